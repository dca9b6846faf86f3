"""Paged attention backends: what they promise (`interface`), the implementations, and the choice (`select`)."""
