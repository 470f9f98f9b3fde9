"""Values only: what the rest of aiokv talks about. Imports nothing but `aiokv.errors` and numpy."""
