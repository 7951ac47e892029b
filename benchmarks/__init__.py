"""Measurements of deltastore on real training, and the demo."""
