import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.discovery.entry import Entry, from_text, newest, split_address, to_text
from kvmesh.types import Member, Role, State

texts = st.text(max_size=20)
counts = st.integers(min_value=0, max_value=2**63)
members = st.builds(
    Member,
    id=st.text(min_size=1, max_size=20),
    role=st.sampled_from(Role),
    epoch=texts,
    address=st.text(min_size=1, max_size=20),
    state=st.sampled_from(State),
    model=texts,
    metrics_address=texts,
    http_address=texts,
    engine=texts,
    block_size=counts,
    total_blocks=counts,
    context_length=counts,
    layout_fingerprint=texts,
    pid=counts,
    labels=st.dictionaries(texts, texts, max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(members, counts)
def test_an_entry_survives_text(member: Member, since: int) -> None:
    entry = Entry(member, since)
    assert from_text(to_text(entry)) == entry


@pytest.mark.parametrize("missing", ["id", "role", "address"])
def test_text_without_the_essential_is_no_entry(missing: str) -> None:
    text = to_text(Entry(a_member(), 1))
    del text[missing]
    with pytest.raises(ValueError, match=missing):
        from_text(text)


@pytest.mark.parametrize("wrong", [{"role": "cook"}, {"state": "asleep"}, {"pid": "x"}])
def test_text_with_wrong_values_is_no_entry(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        from_text(to_text(Entry(a_member(), 1)) | wrong)


def test_a_later_versions_fields_are_passed_over() -> None:
    assert from_text(to_text(Entry(a_member(), 1)) | {"color": "red"}).member == a_member()


def test_a43_restart_replaces_its_own_entry_and_two_workers_are_two() -> None:
    lives = [Entry(a_member(epoch=f"e{n}"), since=n) for n in range(5)]
    other = Entry(a_member(port=2), since=0)
    assert newest([other, *reversed(lives)]) == (lives[-1].member, other.member)


def test_a43_one_address_has_one_member_whatever_the_host_was_called() -> None:
    before = Entry(a_member(name="old-name", epoch="e1"), since=1)
    after = Entry(a_member(name="new-name", epoch="e2"), since=2)
    assert newest([after, before]) == (after.member,)


def test_one_address_may_serve_two_roles() -> None:
    entries = [Entry(a_member(role=role), since=1) for role in (Role.DECODE, Role.PREFILL)]
    assert len(newest(entries)) == 2


def test_everybody_agrees_which_of_two_equally_old_lives_counts() -> None:
    one, two = Entry(a_member(epoch="a"), 7), Entry(a_member(epoch="b"), 7)
    assert newest([one, two]) == newest([two, one])


@pytest.mark.parametrize(
    ("address", "parts"),
    [("h:1", ("h", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_addresses_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "::1:80", "h:-1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="port"):
        split_address(address)


def a_member(port: int = 1, name: str = "h", epoch: str = "e", role: Role = Role.DECODE) -> Member:
    return Member(id=f"{role}-{name}-{port}", role=role, epoch=epoch, address=f"10.0.0.1:{port}")
