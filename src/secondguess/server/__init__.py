"""HTTP server with OpenAI's API over the engine; `create_app` in `app.py` makes the application."""
