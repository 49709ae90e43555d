"""A copy of the dynamic loader that loads programs and refuses to be one.

``ld.so FILE`` runs any ELF file that can be read, noexec or not, so a root in which execve is granted must not hold
a loader that can be started as a program. It cannot be non-executable either: the kernel executes it as the
interpreter of every dynamic program. So the copy gets a new entry: machine code that looks for AT_BASE in
the auxiliary vector. The kernel puts the loader's address there when it loads a program through PT_INTERP, and 0
when the loader itself was executed (getauxval(3), load_elf_binary in fs/binfmt_elf.c). On 0 it exits with 126,
else it jumps to the original entry. tests/kernel/test_ldso.py proves both under runsc.
"""

from __future__ import annotations

import struct

from policy import errors
from sandbox.rootfs import elf

REFUSED_STATUS = 126

# The loaders we know, by machine. A program that names another PT_INTERP is refused: that name comes from the
# package, and what it points at would be copied into the agent's root.
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}

# x86_64, at the kernel's entry: rsp points at argc, argv, NULL, envp, NULL, auxv (System V ABI, figure 3.9).
_HEAD = bytes.fromhex(
    "488b0424"  # mov  rax, [rsp]            argc
    "488d54c410"  # lea  rdx, [rsp+rax*8+16]   envp
    "488b02"  # env: mov rax, [rdx]
    "4883c208"  # add  rdx, 8
    "4885c0"  # test rax, rax
    "75f4"  # jne  env                    past the NULL: rdx is at auxv
    "488b02"  # aux: mov rax, [rdx]        a_type
    "488b4a08"  # mov  rcx, [rdx+8]           a_val
    "4883c210"  # add  rdx, 16
    "4885c0"  # test rax, rax              AT_NULL: there was no AT_BASE
    "7416"  # je   deny
    "4883f807"  # cmp  rax, 7                 AT_BASE
    "75ea"  # jne  aux
    "4885c9"  # test rcx, rcx
    "740b"  # je   deny
    "31c0"  # xor  eax, eax               as the kernel hands over
    "31c9"  # xor  ecx, ecx
    "31d2"  # xor  edx, edx
    "e9"  # jmp  rel32                  the loader's own entry
)
_TAIL = bytes.fromhex(
    "bf7e000000"  # deny: mov edi, 126
    "b8e7000000"  # mov  eax, 231               exit_group
    "0f05"  # syscall
    "0f0b"  # ud2
)
TRAMPOLINE_SIZE = len(_HEAD) + 4 + len(_TAIL)

_ENTRY_AT = 24  # e_entry in Elf64_Ehdr
_FILE_SIZE_AT, _MEMORY_SIZE_AT = 32, 40  # p_filesz and p_memsz in Elf64_Phdr
_PAGE = 4096


def patch(data: bytes, *, name: str = "ld.so") -> bytes:
    """The loader's bytes with the trampoline as its entry; the length stays the same.

    The code goes into the padding between the end of the executable segment and the end of its page, which the
    kernel maps anyway.

    Raises:
        errors.NotEnforceableError: the machine has no trampoline, or the padding is too small or not empty.
        errors.NotElfError: the bytes are no shared object.
    """
    parsed = elf.parse(data, name=name)
    if parsed.arch != "x86_64":
        raise errors.NotEnforceableError(
            f"executables cannot be granted on {parsed.arch}: its loader cannot be stopped from running files",
            hint="leave permissions.executables out, or use an x86_64 host",
        )
    if parsed.interpreter or parsed.kind != elf.ET_DYN:
        raise errors.NotEnforceableError(f"`{name}` is a program, not a dynamic loader")
    index, segment = _home_of_entry(parsed, name)
    cave = segment.offset + segment.file_size
    address = segment.vaddr + segment.file_size
    if segment.file_size != segment.memory_size or _room(parsed, segment, len(data)) < TRAMPOLINE_SIZE:
        raise errors.NotEnforceableError(f"`{name}` has no room for the trampoline")
    if any(data[cave : cave + TRAMPOLINE_SIZE]):
        raise errors.NotEnforceableError(f"`{name}` has data where its padding should be")
    # The displacement of jmp counts from the instruction after it, which is where the tail begins.
    displacement = parsed.entry - (address + len(_HEAD) + 4)
    code = _HEAD + struct.pack("<i", displacement) + _TAIL
    out = bytearray(data)
    out[cave : cave + len(code)] = code
    header = parsed.program_headers_at + index * elf.PROGRAM_HEADER.size
    struct.pack_into("<Q", out, header + _FILE_SIZE_AT, segment.file_size + len(code))
    struct.pack_into("<Q", out, header + _MEMORY_SIZE_AT, segment.memory_size + len(code))
    struct.pack_into("<Q", out, _ENTRY_AT, address)
    return bytes(out)


def _home_of_entry(parsed: elf.Elf, name: str) -> tuple[int, elf.Segment]:
    for index, s in enumerate(parsed.segments):
        inside = s.vaddr <= parsed.entry < s.vaddr + s.file_size
        if s.kind == elf.PT_LOAD and s.flags & elf.PF_X and inside:
            return index, s
    raise errors.NotEnforceableError(f"`{name}` has its entry outside its code")


def _room(parsed: elf.Elf, segment: elf.Segment, size: int) -> int:
    """Bytes after the segment that are mapped with it and belong to nothing else, in the file and in memory."""
    loads = [s for s in parsed.segments if s.kind == elf.PT_LOAD and s is not segment]
    file_end, memory_end = segment.offset + segment.file_size, segment.vaddr + segment.memory_size
    page_end = -(-memory_end // _PAGE) * _PAGE
    # A neighbour is mapped from the start of its own page.
    next_address = min([s.vaddr // _PAGE * _PAGE for s in loads if s.vaddr >= memory_end], default=page_end)
    # A neighbour may say that it begins behind the end of the file; the padding ends with the file all the same.
    next_offset = min([size, *(s.offset for s in loads if s.offset >= file_end)])
    return min(page_end, next_address) - memory_end if next_offset >= file_end + TRAMPOLINE_SIZE else 0
