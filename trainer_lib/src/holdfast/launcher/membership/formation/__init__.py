"""The formation of worlds: proposals, acceptances and starts. Pure."""
