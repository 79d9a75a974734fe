"""Models that see pictures: one file an architecture, and the towers that they share."""
