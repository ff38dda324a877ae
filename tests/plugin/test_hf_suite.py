"""Transformers' own common tests, from its source distribution, on our classes."""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import transformers

SUITE = Path(__file__).parent / "hf_suite"
CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture
def common_tests():
    """Folder of the common tests of the installed Transformers; its wheel has none."""
    name = f"transformers-{transformers.__version__}"
    # Transformers finds the files of its tests by a folder whose name ends so.
    folder = CACHE / f"{name}-tests"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpacked = fetch_source(transformers.__version__, scratch) / "tests"
            # What the tests read, and the distribution leaves out.
            unpacked.joinpath("__init__.py").touch()
            unpacked.joinpath("fixtures").mkdir()
            unpacked.joinpath("fixtures", "sample_text.txt").write_text("Any text will do.\n")
            unpacked.rename(folder)
    return folder


def fetch_source(version, folder):
    """Downloads and unpacks the source distribution of Transformers; skips where there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--dest", folder, f"transformers=={version}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        pytest.skip(f"no source distribution of transformers {version}: {finished.stderr.strip()}")
    (archive,) = Path(folder).glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return archive.with_name(f"transformers-{version}")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1200)
def test_common_tests_of_transformers_pass_or_are_skipped_for_a_listed_reason(
    common_tests, tmp_path
):
    skips = tomllib.loads((SUITE / "skips.toml").read_text())
    listed = {name for names in skips.values() for name in names}
    report = tmp_path / "report.xml"

    finished = subprocess.run(
        [sys.executable, "-m", "pytest", SUITE, "-c", SUITE / "pytest.ini", "--junitxml", report],
        env={**os.environ, "HF_TESTS": str(common_tests), "HF_HUB_OFFLINE": "1", "RUN_SLOW": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-10_000:] + finished.stderr

    unlisted = {
        case.get("name"): skipped.get("message")
        for case in ET.parse(report).iter("testcase")
        for skipped in case.iter("skipped")
        if case.get("name") not in listed
    }
    assert unlisted == {}
