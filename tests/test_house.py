"""The house itself: root links, the wheel, extras, what imports drag in, and words that must not appear."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specprefill_jax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_OURS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
}


def tree_files() -> list[Path]:
    """Every file of ours below the root, links to folders not followed."""
    found: list[Path] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith(".egg-info")]
        found += [Path(folder, name) for name in files]
    return found


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with the root as the working folder."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", ["models", "sharding"])
def test_root_link_leads_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"specprefill_jax/{name}"
    assert (link / "__init__.py").samefile(PACKAGE / name / "__init__.py")


def test_project_metadata():
    assert PROJECT["name"] == "specprefill-jax"
    assert PROJECT["requires-python"] == ">=3.12"
    assert PROJECT["license"] == "Apache-2.0"
    assert "jax>=0.11.2,<0.13" in PROJECT["dependencies"]
    extras = {"cuda12", "tpu", "serve", "eval", "embedding", "lm-eval", "ray", "aot", "test", "dev"}
    assert set(PROJECT["optional-dependencies"]) == extras
    everything = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    assert [name for name in everything if re.match(r"(torch|vllm|tensorflow)\b", name)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the tree by the backend itself, without a network."""
    copy = tmp_path_factory.mktemp("wheel") / "tree"
    skip = shutil.ignore_patterns(*NOT_OURS, "*.egg-info", "tests")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    code = "import setuptools.build_meta as backend; backend.build_wheel('out')"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [path] = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_installs_no_other_top_level_name(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"specprefill_jax", f"specprefill_jax-{PROJECT['version']}.dist-info"}


def test_wheel_holds_every_file_of_the_package(wheel):
    ours = {path.relative_to(ROOT).as_posix() for path in tree_files() if path.is_relative_to(PACKAGE)}
    assert "specprefill_jax/py.typed" in ours
    assert {name for name in wheel.namelist() if name.startswith("specprefill_jax/")} == ours


def test_wheel_carries_the_licence(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in wheel.read(name)


EXTRA_MODULES = ["starlette", "uvicorn", "prometheus_client", "ray", "lm_eval", "nltk", "rouge", "jieba", "fuzzywuzzy"]
EXTRA_MODULES += ["fastapi", "openai", "torch", "tensorflow"]


def test_core_imports_no_extra(tmp_path):
    """Stand-ins for the extras come first on the path and note who asks; the last import proves that they do."""
    log = tmp_path / "log"
    for name in EXTRA_MODULES:
        stub = f"open({str(log)!r}, 'a').write({name!r} + '\\n')\nraise ImportError({name!r} + ' is a stand-in')\n"
        (tmp_path / f"{name}.py").write_text(stub)
    code = """
import importlib, pkgutil
import specprefill_jax
outer = ("specprefill_jax.server", "specprefill_jax.evals")
for module in pkgutil.walk_packages(specprefill_jax.__path__, "specprefill_jax."):
    if not module.name.startswith(outer):
        importlib.import_module(module.name)
try:
    import torch
except ImportError:
    print("done")
"""
    done = run_python(code, PYTHONPATH=str(tmp_path), JAX_PLATFORMS="cpu")
    assert done.stdout == "done\n", done.stderr
    assert log.read_text().split() == ["torch"]


def forbidden_in(text: str) -> list[str]:
    """The forbidden words in `text`; written in pieces here, so that this file is no find itself."""
    places = ["/" + "work/", "../" + "shared"]
    places += ["hugging" + "face.co", "hf" + ".co/", "pypi" + ".org", "python" + "hosted", "pytorch" + ".org"]
    marks = ["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "no" + "qa"]
    return [word for word in places if word in text] + [word for word in marks if re.search(rf"\b{word}\b", text)]


def test_forbidden_words_are_found():
    assert forbidden_in("# TO" + "DO: x") == ["TO" + "DO"]
    assert forbidden_in("https://pypi" + ".org/simple") == ["pypi" + ".org"]
    assert forbidden_in("a workplace, shared: work/ and todos") == []


def test_no_forbidden_words():
    found = {}
    for path in tree_files():
        try:
            words = forbidden_in(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if words:
            found[path.relative_to(ROOT).as_posix()] = words
    assert found == {}


def unsafe_in(source: str) -> list[str]:
    """What runs foreign code: pickle and its kin, eval, exec, trust_remote_code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in {"pickle", "dill", "marshal", "shelve"}]
        elif isinstance(node, ast.ImportFrom) and node.module in {"pickle", "dill", "marshal", "shelve"}:
            found.append(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            found.append(node.func.id)
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if refused else [node.arg]
    return found


def test_unsafe_code_is_found():
    source = "import pickle\nfrom marshal import loads\neval('1')\nload(x, trust_remote_code=True)\n"
    source += "x.eval()\nload(x, trust_remote_code=False)\n"
    assert sorted(unsafe_in(source)) == ["eval", "marshal", "pickle", "trust_remote_code"]


def test_package_and_scripts_run_no_foreign_code():
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    assert len(sources) > 5
    found = {path.name: unsafe_in(path.read_text(encoding="utf-8")) for path in sources}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize("name", ["Makefile", ".ci/run", "README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.-])(?:scripts|examples|tests|specprefill_jax)/[\w/.-]+\.[a-z]+\b", text))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^(?:    )?(?:@?make) ([a-z]+)", text, re.MULTILINE)) <= targets


def test_stamps_lie_in_ignored_folders():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {"/.venv/", "/build/", "__pycache__/"} <= set(ignored)


class TestFindPython:
    """scripts/find_python.sh, with a PATH that holds only what each test puts there."""

    @pytest.fixture
    def tools(self, tmp_path) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("bash", "cat"):
            (folder / name).symlink_to(str(shutil.which(name)))
        return folder

    def find(self, tools: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script; PYENV_ROOT and HOME are empty unless given."""
        clean = {"PATH": str(tools), "HOME": str(tools), **environment}
        command = [str(tools / "bash"), str(ROOT / "scripts/find_python.sh")]
        return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)

    @staticmethod
    def put(folder: Path, name: str, script: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def test_passes_over_a_shim_that_fails(self, tools):
        self.put(tools, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
        self.put(tools, "python3", f'exec {sys.executable} "$@"')
        done = self.find(tools)
        assert (done.returncode, done.stderr) == (0, "")
        assert Path(done.stdout.strip()).samefile(sys.executable)

    def test_passes_over_an_old_python(self, tools):
        # An old Python fails the check that is handed to it, whatever it is called.
        self.put(tools, "python3", "exit 1")
        assert self.find(tools).returncode == 1

    def test_finds_a_pyenv_version_that_is_not_selected(self, tools, tmp_path):
        self.put(tmp_path / "pyenv", "versions/3.12.1/bin/python3", f'exec {sys.executable} "$@"')
        done = self.find(tools, PYENV_ROOT=str(tmp_path / "pyenv"))
        assert done.returncode == 0
        assert Path(done.stdout.strip()).samefile(sys.executable)

    def test_falls_back_to_uv_and_says_so(self, tools):
        self.put(tools, "uv", 'case "$2" in install) exit 0;; find) echo /from/uv/python3.13;; esac')
        done = self.find(tools)
        assert (done.returncode, done.stdout) == (0, "/from/uv/python3.13\n")
        assert "asking uv" in done.stderr

    def test_says_what_to_do_where_there_is_nothing(self, tools):
        done = self.find(tools)
        assert (done.returncode, done.stdout) == (1, "")
        assert "needs Python 3.12 or newer" in done.stderr

    def test_a_named_python_that_will_not_do_is_said(self, tools):
        self.put(tools, "python3", f'exec {sys.executable} "$@"')
        done = self.find(tools, PYTHON="/nowhere/python")
        assert done.returncode == 0
        assert "PYTHON=/nowhere/python does not run" in done.stderr


def test_every_test_that_is_promised_is_there():
    """docs/met-elsewhere.md names a test for what users of other implementations met."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "met-elsewhere.md").read_text()))
    written = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"def (test_\w+)", file.read_text()))
    assert len(named) > 30
    assert named <= written
