"""Plans for people: as text and as diagrams. Pure."""
