"""Rule files of KTransformers: read as data, and said again in our grammar."""
