"""The rule files that come with moegraft, by name."""

from pathlib import Path

# Names of earlier rule files for single families, which `cpu` serves as well.
FORMER_NAMES = dict.fromkeys(
    (
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "mixtral"),
        *("olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
    ),
    "cpu",
)


def shipped_rules() -> dict[str, Path]:
    """Return every shipped rule file by the name that `rules=` and `extends:` take, such as `cpu`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
