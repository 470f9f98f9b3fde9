"""The asyncio shell around the core: the only place with `async def`."""
