"""An OpenAI-compatible HTTP server on the engine: `aiokv serve`.

From a request to its answer:
- `errors`: every error a client can get; `schema`: what requests may say; `body`: reading and checking them
- `prompts`: tokens of each prompt, and whether they fit; `gate`: who may come in, who waits, who runs
- `stop_text`, `choices`: generating the choices of one request; `answers`: what is sent of them
- `exchange`: one HTTP request from its body to its last byte; `metrics`: what is counted of it
- `service`, `app`, `openapi`: all of it as a FastAPI app
- `connection`: how long a client is waited for; `log_limit`: what is logged
- `process`: the app on a socket, signals, drain, leak report
- `command`: the command; `notices`: what it tells; `defaults`: what it does unless told otherwise
"""
