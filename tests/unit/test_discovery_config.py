import random
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.config import ConfigError, load
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.factory import create, local_directory
from kvmesh.discovery.static import parse_member
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, Role, State


def test_settings_load_and_the_token_is_secret(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--kind", "consul", "--consul-token", "s3cret", "--print-config"]
    with pytest.raises(SystemExit):
        load(DiscoveryConfig, argv=argv, environ={}, prog="x")
    shown = capsys.readouterr().out
    assert 'kind = "consul"' in shown
    assert "s3cret" not in shown


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--kind", "dns"], "kind"),
        (["--consul-address", "localhost"], "consul_address"),
        (["--consul-ttl-seconds", "0.2"], "consul_ttl_seconds"),
        (["--consul-prefix", "a/b"], "consul_prefix"),
        (["--consul-cert-file", "x.pem"], "consul_key_file"),
        (["--static-members", "decode=h"], "static_members"),
        (["--static-members", "cook=h:1"], "cook"),
        (["--static-members", "decode=h:1;model"], "model"),
        (["--static-members", "decode=h:1;block_size=x"], "x"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(DiscoveryConfig, argv=argv, environ={}, prog="x")


def test_a_static_member_is_ready_and_of_unknown_epoch() -> None:
    assert parse_member("decode=10.0.0.7:7001; model=smol; block_size=16; label-zone=a") == Member(
        id="decode-10.0.0.7-7001",
        role=Role.DECODE,
        epoch="",
        address="10.0.0.7:7001",
        state=State.READY,
        model="smol",
        block_size=16,
        labels={"zone": "a"},
    )


async def test_static_members_are_shown_once_and_registering_changes_nothing() -> None:
    config = DiscoveryConfig(
        kind=DiscoveryKind.STATIC, static_members=("router=h:2", "decode=h:1", "decode=h:1")
    )
    async with create(config, SystemClock(), random.Random(1)) as discovery:
        watch = discovery.watch()
        seen = await anext(watch)
        assert [member.id for member in seen] == ["decode-h-1", "router-h-2"]
        async with discovery.register(parse_member("decode=h:9")) as registration:
            await registration.set_state(State.DRAINING)
            again = discovery.watch()
            assert await anext(again) == seen
            await again.aclose()  # type: ignore[attr-defined]
        await watch.aclose()  # type: ignore[attr-defined]


def test_the_default_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = local_directory(DiscoveryConfig())
    assert directory.stat().st_mode & 0o777 == 0o700
    assert local_directory(DiscoveryConfig()) == directory


def test_a_default_directory_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    local_directory(DiscoveryConfig()).chmod(0o777)
    with pytest.raises(UnavailableError, match="private"):
        local_directory(DiscoveryConfig())


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        local_directory(DiscoveryConfig(directory=str(tmp_path / "file" / "members")))
