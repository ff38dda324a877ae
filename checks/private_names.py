"""Why the plug-in touches each private name of another library, and what happens without it."""

REASONS: dict[str, str] = {}
