"""The relay of the ssh-agent service: its bytes are those of its source, and it calls what it declares."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from policy import data
from policy.compile import init
from sandbox.network import addresses
from sandbox.rootfs import elf, init_program

SOURCE = Path(init_program.__file__).with_name("ssh_relay.S")


def test_relay_bytes_are_those_of_source(tmp_path: Path) -> None:
    subprocess.run(["as", "-o", tmp_path / "relay.o", SOURCE], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", tmp_path / "relay.o", tmp_path / "text"], check=True)
    assert (tmp_path / "text").read_bytes() == init_program.RELAY
    assert bytes(map(int, addresses.GATEWAY4.split("."))) in init_program.RELAY[-16:]


def test_relay_is_static_program_without_needs() -> None:
    found = elf.parse(init_program.build(init_program.RELAY), name="relay")
    assert (found.arch, found.interpreter, found.needed, found.dynamic) == ("x86_64", "", (), False)
    assert [segment.flags for segment in found.segments if segment.kind == elf.PT_LOAD] == [5]


def test_relay_calls_are_those_it_declares() -> None:
    numbers = data.syscalls("x86_64").numbers
    lines = SOURCE.read_text().splitlines()
    loads = [head for at, head in enumerate(lines) if lines[at + 1 : at + 2] == ["\tsyscall"] and "%eax" in head]
    assert len(loads) == sum(line == "\tsyscall" for line in lines)
    moved = {int(found[1]) for head in loads if (found := re.search(r"\$(\d+), %eax", head))}
    moved |= {0 for head in loads if "xor" in head}
    assert {name for name, number in numbers.items() if number in moved} == init.SSH_CALLS
