"""The rule files that come with moegraft, by name."""

from pathlib import Path


def shipped_rules() -> dict[str, Path]:
    """Every shipped rule file by the name that `rules=` and `extends:` take, such as `cpu`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
