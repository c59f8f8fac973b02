"""The stores behind `DataPlaneClient`, one per file."""
