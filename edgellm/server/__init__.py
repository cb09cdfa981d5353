"""The OpenAI-compatible server over an engine: addresses, security, routes, streams, metrics, lifecycle."""
