"""A package of plugin API 1.0. Never edited."""
