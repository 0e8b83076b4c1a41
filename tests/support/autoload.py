"""moegraft's entry point for torch's backends, as pip makes it known, in a folder that a program has on its path."""

from __future__ import annotations

from pathlib import Path


def write_autoload(folder: Path, *, on: bool) -> None:
    """Write the distribution's data, with a marker of its own in place of the environment's, and switch it on or off."""
    about = folder / "moegraft-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moegraft\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nmoegraft = for_this_test:on_torch_import\n")
    hook = f"import pathlib, moegraft.operators.autoload as a; a.MARKER = pathlib.Path({str(folder / 'etc' / 'on')!r});"
    (folder / "for_this_test.py").write_text(f"{hook} a.switch(on={on}); on_torch_import = a.on_torch_import")
