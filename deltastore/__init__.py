"""deltastore: git for model weights on object storage."""

__version__ = "0.1.0"
