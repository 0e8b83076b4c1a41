"""Run suites that others wrote against a server of ours, and write the table that the documents show.

    python tests/server_suites.py                      # every suite; downloads go to a temporary folder
    python tests/server_suites.py --suite llama.cpp --folder /tmp/suites

Each suite comes from the package index when this runs, and none of it is kept here. A test passes, fails, or does not apply, with the
reason; the exit code is 1 if any fails. `--write` puts the numbers into rules/guide/server.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "rules" / "guide" / "server.md"
BEGIN, END = "<!-- suites -->\n", "<!-- end of suites -->"
PATIENCE_S = 1800
SCHEMATHESIS = "4.32.5"
JSON_SCHEMA = "4.26.0"  # of jsonschema
OPEN_RESPONSES = "2.4.0"  # of openresponses-types
LANGCHAIN = {"langchain-tests": "1.1.9", "langchain-openai": "1.7.4"}
LLAMA_CPP = "0.3.36"  # of llama-cpp-python, whose source distribution has llama.cpp's tests


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one test; `reason` is why it failed or does not apply."""

    test: str
    outcome: str
    reason: str = ""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)


def pytest_results(
    arguments: Sequence[str], cwd: Path, before: Sequence[Path], after: Sequence[Path] = (), **variables: str
) -> Iterator[Result]:
    """Yield the results of a run of pytest in a process of its own, which finds modules before and after this process's folders as well."""
    report = cwd / "report.xml"
    path = os.pathsep.join([*map(str, before), str(ROOT / "tests"), *sys.path[1:], *map(str, after)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables, "PYTHONPATH": path}, timeout=PATIENCE_S, check=False)
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode} and without a report")
    yield from report_results(report)


def report_results(report: Path) -> Iterator[Result]:
    """Yield the results in a report in JUnit's form."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = "::".join(filter(None, [case.get("classname", "").rpartition(".")[2], case.get("name")]))
        end = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if end is None else "not applicable" if end.tag == "skipped" else "failed"
        yield Result(name, outcome, "" if end is None else " ".join((end.get("message") or "").split()))


def llama_cpp(folder: Path) -> Iterator[Result]:
    """llama.cpp's tests of its server, of which those that load large models are left out as in its own default."""
    pip("download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), f"llama-cpp-python=={LLAMA_CPP}")
    pip("install", "--target", str(folder / "packages"), "requests", "wget", "filelock")
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    wanted = re.compile(r"[^/]+/vendor/llama\.cpp/(tools/server/tests|models/templates)/")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, [member for member in opened if wanted.match(member.name)], filter="data")
    [tests] = folder.glob("llama_cpp_python-*/vendor/llama.cpp/tools/server/tests")
    arguments = ["-p", "support.llama_suite", "--noconftest", "-m", "not slow", "unit"]
    yield from pytest_results(arguments, tests, [tests, folder / "packages"])


def langchain(folder: Path) -> Iterator[Result]:
    """LangChain's tests of a chat model, with `langchain-openai` as the client."""
    packages = folder / "packages"
    versions = [f"{name}=={version}" for name, version in LANGCHAIN.items()]
    pip("install", "--upgrade", "-c", str(ROOT / "constraints.txt"), "--target", str(packages), *versions)
    module = ROOT / "tests" / "support" / "langchain_suite.py"
    arguments = ["-c", os.devnull, "--rootdir", str(folder), "--import-mode=importlib", "-o", "asyncio_mode=auto", str(module)]
    # Behind this environment's packages, of which it has copies.
    yield from pytest_results(["-p", "pytest_asyncio", *arguments], folder, [], [packages])


def open_responses(folder: Path) -> Iterator[Result]:
    """Answers of /v1/responses and their events in strict validation by the types of the Open Responses specification."""
    packages = folder / "packages"
    pip("install", "--no-deps", "--upgrade", "--target", str(packages), f"openresponses-types=={OPEN_RESPONSES}")
    module = ROOT / "tests" / "support" / "responses_suite.py"
    arguments = ["-c", os.devnull, "--rootdir", str(folder), "--import-mode=importlib", str(module)]
    yield from pytest_results(arguments, folder, [], [packages])


def json_schema(folder: Path) -> Iterator[Result]:
    """The official suite of JSON Schema, which jsonschema's source distribution has, over the constraints of answers."""
    pip("download", "--no-deps", "--no-binary", "jsonschema", "-d", str(folder), f"jsonschema=={JSON_SCHEMA}")
    [archive] = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    [suite] = folder.glob("jsonschema-*/json/tests/draft2020-12")
    module = ROOT / "tests" / "support" / "schema_suite.py"
    arguments = ["-c", os.devnull, "--rootdir", str(folder), "--import-mode=importlib", str(module)]
    yield from pytest_results(arguments, folder, [], JSON_SCHEMA_SUITE=str(suite))


def schemathesis(folder: Path) -> Iterator[Result]:
    """Requests that schemathesis makes from the server's OpenAPI document: one result for each route."""
    packages, report = folder / "packages", folder / "report.xml"
    pip("install", "--upgrade", "--target", str(packages), f"schemathesis=={SCHEMATHESIS}")
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path[1:]])
    with subprocess.Popen(
        [sys.executable, "-m", "support.tiny_server"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        address = server.stdout.readline().strip()
        command = [sys.executable, str(packages / "bin" / "schemathesis"), "run", f"{address}/openapi.json", "--seed", "1"]
        # A body that follows the document may still name another model, or tokens that this one lacks.
        command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", "50"]
        command += ["--report", "junit", "--report-junit-path", str(report)]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(packages)}, timeout=PATIENCE_S, check=False)
        server.stdin.close()
    yield from report_results(report)


SUITES: Mapping[str, tuple[str, Callable[[Path], Iterator[Result]]]] = {
    "llama.cpp": (f"llama.cpp's tests of its server (llama-cpp-python {LLAMA_CPP})", llama_cpp),
    "langchain": (f"LangChain's tests of a chat model (langchain-tests {LANGCHAIN['langchain-tests']})", langchain),
    "open responses": (f"answers by the types of Open Responses (openresponses-types {OPEN_RESPONSES})", open_responses),
    "json schema": (f"the JSON Schema suite, draft 2020-12 (jsonschema {JSON_SCHEMA})", json_schema),
    "schemathesis": (f"schemathesis {SCHEMATHESIS} on the OpenAPI document, by route", schemathesis),
}


def table(counts: Mapping[str, Counter[str]]) -> str:
    rows = ["| suite | passed | failed | does not apply |", "|---|---|---|---|"]
    rows += [f"| {SUITES[name][0]} | {count['passed']} | {count['failed']} | {count['not applicable']} |" for name, count in counts.items()]
    return "\n".join(rows) + "\n"


def passed_before(name: str) -> int:
    """Return how many tests pass by the table in the guide: one that no longer applies is no failure, and has to be noticed."""
    row = next((line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {SUITES[name][0]} |")), None)
    return 1 if row is None else int(row.split("|")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this one; may be repeated")
    parser.add_argument("--folder", type=Path, help="where the downloads are kept; a temporary one by default")
    parser.add_argument("--write", action="store_true", help="write the table into the guide, for which every suite has to run")
    given = parser.parse_args()
    if given.write and given.suite:
        parser.error("--write needs the numbers of every suite")
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.suite or SUITES:
            folder = (given.folder or Path(temporary)).resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            results = list(SUITES[name][1](folder))
            counts[name] = Counter(result.outcome for result in results)
            for result in sorted(results, key=lambda result: (result.outcome, result.reason)):
                print(f"{name}: {result.outcome}: {result.test}" + (f": {result.reason}" if result.reason else ""))
    print(table(counts))
    if given.write:
        text = GUIDE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        GUIDE.write_text(f"{before}{BEGIN}\n{table(counts)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    fewer = {} if given.write else {name: least for name in counts if counts[name]["passed"] < (least := passed_before(name))}
    for name, least in fewer.items():
        print(f"{name}: fewer tests pass than the {least} in {GUIDE.relative_to(ROOT)}")
    return 1 if fewer or any(count["failed"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
