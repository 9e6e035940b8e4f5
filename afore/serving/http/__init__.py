"""The HTTP door: OpenAI's endpoints over the engine, in the door's own process and event loop."""
