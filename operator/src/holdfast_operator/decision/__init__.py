"""One pure policy per file; `decide` calls them in order."""
