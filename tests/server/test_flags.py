"""What the two serving commands share; tests/scripts has the commands themselves."""

from dataclasses import fields

import pytest
from script_modules import load_script

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.server.flags import ServeFlags, complain, loopback, url, warn_if_open
from specprefill_jax.server.service import ServerSettings

COMMANDS = [load_script(name) for name in ("serve", "serve_ray")]


def test_addresses():
    assert url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url("::", 8000) == url("::1", 8000) == "http://[::1]:8000"
    assert url("me.example", 80) == "http://me.example:80"
    near, far = ("127.0.0.1", "127.8.0.9", "localhost", "::1"), ("0.0.0.0", "::", "10.0.0.1", "me.example", "")
    assert [loopback(host) for host in (*near, *far)] == [True] * 4 + [False] * 5


@pytest.mark.parametrize(("keys", "host", "warns"), [((), "0.0.0.0", True), (("a",), "::", False), ((), "::1", False)])
def test_a_server_that_is_open_to_others_is_warned_of(capsys, keys, host, warns):
    warn_if_open(ServerSettings(api_keys=keys), host)
    assert ("set --api-key" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("command", COMMANDS)
def test_both_commands_have_the_flags_and_their_defaults(command):
    options, shared = command.parse([]), ServeFlags()
    assert isinstance(options, ServeFlags)
    assert {name.name: getattr(options, name.name) for name in fields(shared)} == vars(shared)


@pytest.mark.parametrize("command", COMMANDS)
def test_rapid_mlx_1458_no_name_of_a_pair_loosens_the_defaults(command):
    for main, speculator in (("smollm2-135m-deep4", "smollm2-135m"), ("some/model", "another/model")):
        options = command.parse(["--main", main, "--speculator", speculator])
        assert options.settings().defaults == SpecPrefillConfig()


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_are_what_the_flags_say(command, monkeypatch):
    monkeypatch.setenv("SPECPREFILL_API_KEY", "c")
    flags = ["--api-key", "a", "--api-key", "b", "--model-name", "boat", "--max-body-bytes", "5000"]
    options = command.parse([*flags, "--keep-alive-seconds", "2", "--keep-rate", "0.5", "--tail-tokens", "9"])
    settings = options.settings()
    assert settings.api_keys == ("a", "b", "c")
    assert (settings.model_name, settings.max_body_bytes, settings.keep_alive_seconds) == ("boat", 5000, 2.0)
    assert (settings.defaults.keep_rate, settings.defaults.tail_tokens) == (0.5, 9)
    monkeypatch.delenv("SPECPREFILL_API_KEY")
    assert command.parse([]).settings().api_keys == ()
    with pytest.raises(ArgumentError, match="max_body_bytes=1 is not allowed"):
        command.parse(["--max-body-bytes", "1"]).settings()


def test_what_is_wrong_is_said_in_one_line(capsys):
    assert complain(ValueError("a\n  b\x1b[31m")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: a b")
    assert said.count("\n") == 1
    assert "\x1b" not in said
