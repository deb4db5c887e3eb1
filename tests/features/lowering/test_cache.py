"""The cache of lowered programs under bad conditions."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from opcast.features.lowering.cache import LoweringCache


@pytest.fixture
def cache(tmp_path):
    return LoweringCache(tmp_path / "lowered")


def entries(cache):
    return sorted(p for p in cache.root.rglob("*") if p.is_file())


def _bytes(cache: LoweringCache) -> int:
    return sum(path.stat().st_size for path in cache.root.rglob("*.json.gz"))


def test_hit_and_miss(cache):
    key = cache.key("content", "cpu")
    assert cache.get(key) is None
    cache.put(key, "HloModule m", {"peak_memory_bytes": 3.0})
    assert cache.get(key) == ("HloModule m", {"peak_memory_bytes": 3.0})
    assert cache.get(cache.key("other content", "cpu")) is None


def test_keys_depend_on_every_part(cache):
    keys = {cache.key(*parts) for parts in (("a", "b"), ("ab",), ("a", "c"), ("b", "a"), ("a",))}
    assert len(keys) == 5


def test_the_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    assert LoweringCache().root == tmp_path / "lowered"


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b garbage", b"not gzip at all", None])
def test_damaged_entries_are_ignored_and_rewritten(cache, damage, caplog):
    key = cache.key("x")
    cache.put(key, "HloModule m" * 50, {})
    path = entries(cache)[0]
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert cache.get(key) is None
    assert "damaged" in caplog.text
    cache.put(key, "HloModule new", {})
    assert cache.get(key) == ("HloModule new", {})


def _write(root: str, number: int) -> bool:
    cache = LoweringCache(root)
    key = cache.key("shared")
    for i in range(20):
        cache.put(key, f"HloModule m{number}_{i} " + "x" * 20000, {"n": number})
        found = cache.get(key)
        if found is None or not found.hlo.startswith(f"HloModule m{found.meta['n']}_"):
            return False
    return True


def test_two_processes_write_the_same_entry(cache):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(_write, [str(cache.root)] * 2, [1, 2]))
    assert len(entries(cache)) == 1  # and no temporary file is left


def test_a_folder_that_cannot_be_written_only_logs(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = LoweringCache(blocked / "lowered")
    with caplog.at_level(logging.WARNING):
        cache.put(cache.key("x"), "HloModule m", {})
    assert "cannot write" in caplog.text
    assert cache.get(cache.key("x")) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_only_logs(cache, caplog):
    cache.put(cache.key("x"), "HloModule m", {})
    cache.root.chmod(0o500)
    try:
        cache.put(cache.key("y"), "HloModule m", {})
        assert cache.get(cache.key("x")) is not None
    finally:
        cache.root.chmod(0o700)


def test_a_full_disk_leaves_nothing_half_written(cache, monkeypatch, caplog):
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.WARNING):
        cache.put(cache.key("x"), "HloModule m", {})
    assert "No space left" in caplog.text
    assert entries(cache) == []


def test_least_recently_used_entries_go_first(tmp_path):
    text = os.urandom(5000).hex()  # about 6 kB compressed
    cache = LoweringCache(tmp_path, max_bytes=20_000)
    keys = [cache.key(str(i)) for i in range(3)]
    for age, key in enumerate(keys):
        cache.put(key, text, {})
        os.utime(cache.root / key[:2] / f"{key}.json.gz", (1000 + age, 1000 + age))
    assert cache.get(keys[0]) is not None  # now the most recently used
    cache.put(cache.key("new"), text, {})
    assert _bytes(cache) <= 20_000
    assert cache.get(keys[0]) is not None and cache.get(cache.key("new")) is not None
    assert cache.get(keys[1]) is None


def test_clear(cache):
    cache.put(cache.key("x"), "HloModule m", {})
    cache.clear()
    assert _bytes(cache) == 0
