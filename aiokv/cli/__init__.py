"""The `aiokv` command: its own commands and those of installed integrations."""
