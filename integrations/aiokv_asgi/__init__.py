"""Embeds an aiokv runtime in a Starlette or FastAPI app: lifespan, metrics, probes, admin routes, live page."""
