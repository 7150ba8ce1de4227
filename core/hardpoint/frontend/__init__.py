"""The side of the engine that callers see: tokens, templates, text, and the client of the engine."""
