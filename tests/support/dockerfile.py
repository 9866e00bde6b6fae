"""Dockerfiles as lists of instructions, and what an image made of one is started with."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction with its continuation lines joined."""

    stage: int
    word: str
    value: str


@dataclass(frozen=True)
class Image:
    """What the last stage says; ENV includes that of the stages it is built on."""

    instructions: tuple[Instruction, ...]

    def last(self, word: str) -> str:
        """The value of the last such instruction of the last stage."""
        last_stage = self.instructions[-1].stage
        return [i.value for i in self.instructions if i.word == word and i.stage == last_stage][-1]

    @property
    def command(self) -> list[str]:
        """ENTRYPOINT and CMD."""
        entry, arguments = json.loads(self.last("ENTRYPOINT")), json.loads(self.last("CMD"))
        return [*entry, *arguments]

    @property
    def health_command(self) -> list[str]:
        """The command of the health check."""
        words: list[str] = json.loads(self.last("HEALTHCHECK").partition("CMD ")[2])
        return words

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the running image, without PATH."""
        base = {i.stage for i in self.instructions if i.word == "FROM" and i.value.endswith(" AS base")}
        stages = base | {self.instructions[-1].stage}
        pairs = [p for i in self.instructions if i.word == "ENV" and i.stage in stages for p in shlex.split(i.value)]
        return {name: value for name, value in (pair.split("=", 1) for pair in pairs) if name != "PATH"}


def read_dockerfile(path: Path) -> Image:
    """Comments are dropped and lines that end in a backslash joined."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.lstrip().startswith("#"))
    instructions, stage = [], -1
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            word, _, value = line.strip().partition(" ")
            stage += word == "FROM"
            instructions.append(Instruction(stage, word, value.strip()))
    return Image(tuple(instructions))


def with_flags(command: list[str], **values: str) -> list[str]:
    """The command with the values of these flags replaced; each must be there already."""
    replaced = list(command)
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}="
        (place,) = [i for i, word in enumerate(command) if word.startswith(flag)]
        replaced[place] = flag + value
    return replaced
