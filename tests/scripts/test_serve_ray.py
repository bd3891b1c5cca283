"""The command's flags; tests/server/test_ray.py has what it deploys."""

import sys
from types import SimpleNamespace

import pytest
from script_modules import load_script

serve_ray = load_script("serve_ray")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "0"], "port=0 is not allowed"),
        (["--replicas", "0"], "error: replicas=0 is not allowed"),
        (["--replicas", "2", "--max-replicas", "1"], "max_replicas=1 is not allowed"),
        (["--num-gpus", "1.5"], "num_gpus=1.5 is not allowed"),
        (["--keep-rate", "2"], "keep_rate=2.0 is not allowed"),
        (["--api-key", " "], "api_keys='(hidden)' is not allowed"),
    ],
)
def test_wrong_flags_are_an_error_of_one_line(capsys, flags, said):
    assert serve_ray.main(flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_replicas_load_what_the_flags_say(monkeypatch):
    made = []

    class Engine:
        @classmethod
        def from_pretrained(cls, main, speculator, **more):
            more.pop("report")("load", 0, 1)
            made.append((main, speculator, more))
            return cls()

        def start(self):
            made.append("started")

    monkeypatch.setitem(sys.modules, "specprefill_jax.engine.engine", SimpleNamespace(Engine=Engine))
    options = serve_ray.parse(["--main", "a", "--speculator", "b", "--max-running", "3", "--keep-rate", "0.2"])
    assert isinstance(serve_ray.load(options), Engine)
    [(main, speculator, more), started] = made
    assert (main, speculator, started) == ("a", "b", "started")
    assert more["config"].max_running == 3
    assert more["defaults"].keep_rate == 0.2
    assert (more["dtype"], more["mesh"], more["kernels"]) == ("float32", None, None)


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_of_our_own_wants_a_token(monkeypatch, address):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    serve_ray.prepare_environment(serve_ray.Options(address=address))
    assert serve_ray.os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ("RAY_AUTH_MODE" in serve_ray.os.environ) is (address is None)
    assert len(serve_ray.os.environ.get("RAY_AUTH_TOKEN", "")) == (64 if address is None else 0)
