"""Which tensors of one model make up the tensors of another: names, joins, slices, transposes.

A rule is written `target: source`, both patterns of names:

- `{i}` is a number, the same one on both sides; `{i+1}` in the source is the next one;
- `{a,b}` on both sides: one rule for each alternative;
- `{q,k,v}` only in the source: these tensors joined along their rows, in this order, as is a list;
- `name[1/3]`: the second of three equal blocks of rows;
- `name^T`: transposed.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

Shape = tuple[int, ...]

# In a group, so that `split` keeps them.
_ALTERNATIVES = re.compile(r"(\{[^{}]*,[^{}]*\})")
_NUMBER = re.compile(r"\{([a-z]\w*)(?:\+1)?\}")
_BRACES = re.compile(rf"{_NUMBER.pattern}|{_ALTERNATIVES.pattern}")
_PIECE = re.compile(r"(?P<name>.+?)(\[(?P<block>\d+)/(?P<blocks>\d+)\])?(?P<transposed>\^T)?")


@dataclass(frozen=True)
class TensorPart:
    """A source tensor, or one of its equal blocks of rows.

    Attributes:
        name: Name of the tensor.
        block: Which block, from 0.
        blocks: Into how many the rows are cut; 1 is the whole tensor.
        transposed: Whether the tensor is transposed first.
    """

    name: str
    block: int = 0
    blocks: int = 1
    transposed: bool = False

    @classmethod
    def parse(cls, text: str) -> "TensorPart":
        """Reads `name`, `name[1/3]`, `name^T` or `name[1/3]^T`.

        Raises:
            ValueError: If the block is none of those.
        """
        found = _PIECE.fullmatch(text)
        block = int(found["block"] or 0) if found else 0
        blocks = int(found["blocks"] or 1) if found else 0
        if not found or block >= blocks:
            raise ValueError(f"{text!r} must name a tensor or a block of it such as name[0/3].")
        return cls(found["name"], block, blocks, bool(found["transposed"]))

    def __str__(self) -> str:
        block = f"[{self.block}/{self.blocks}]" * (self.blocks > 1)
        return f"{self.name}{block}{'^T' * self.transposed}"

    def shape(self, shape: Shape) -> Shape:
        """Shape of the piece of a tensor of this shape; empty if it cannot be cut so."""
        if not shape or (self.transposed and len(shape) != 2):
            return ()
        rows, *others = shape[::-1] if self.transposed else shape
        return () if rows % self.blocks else (rows // self.blocks, *others)

    def cut(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor."""
        whole = tensor.T if self.transposed else tensor
        return whole.chunk(self.blocks)[self.block]


@dataclass(frozen=True)
class Plan:
    """Sources of each target tensor, and everything that is wrong with them.

    Attributes:
        shapes: Shapes of the target tensors.
        pieces: Parts by the names of target tensors.
        copies: The same for second names of these, by both names.
        faults: Human-readable; empty if the plan can be carried out.
    """

    shapes: Mapping[str, Shape]
    pieces: dict[str, list[TensorPart]]
    copies: dict[tuple[str, str], list[TensorPart]]
    faults: list[str]

    def lines(self) -> Iterator[str]:
        """Each target and its pieces, in the notation of the rules."""
        for target, pieces in self.pieces.items():
            yield f"{target} <- {' + '.join(map(str, pieces))}"
        for (name, target), pieces in self.copies.items():
            yield f"{name} = {target} <- {' + '.join(map(str, pieces))}"

    def check(self) -> None:
        """Rejects a plan that cannot be carried out; names all faults."""
        if self.faults:
            raise ValueError(
                "The source must have exactly what its declaration names, got:\n"
                + "\n".join(self.faults)
            )

    def carry_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The target tensors, made of the source's tensors, in memory of their own.

        Raises:
            ValueError: If tensors that should be the same one differ.
        """

        def join(target: str, pieces: list[TensorPart]) -> Tensor:
            joined = torch.cat([piece.cut(tensors[piece.name]) for piece in pieces])
            return joined.reshape(self.shapes[target])

        made = {target: join(target, pieces) for target, pieces in self.pieces.items()}
        differing = [
            f"{' + '.join(map(str, pieces))} must equal "
            f"{' + '.join(map(str, self.pieces[target]))}, because {name} and {target} are one "
            "tensor by the config, got other values"
            for (name, target), pieces in self.copies.items()
            if not torch.equal(join(target, pieces), made[target])
        ]
        if differing:
            raise ValueError("\n".join(differing))
        return made


class WeightMap:
    """Rules from the names of one model's tensors to the names of another model's.

    Args:
        rules: Source patterns by target patterns.
        ignored: Patterns (`*`, `?`) of source tensors that are no weights, as computed tables.
        older: Rules for single tensors that older releases of the source's program call otherwise.

    Raises:
        ValueError: If rules cannot be read; names all of them.
    """

    def __init__(
        self,
        rules: Mapping[str, str | list[str]],
        ignored: Iterable[str] = (),
        older: Mapping[str, str] | None = None,
    ) -> None:
        faults = [fault for pair in rules.items() for fault in _rule_faults(*pair)]
        if faults:
            raise ValueError("\n".join(faults))
        self.rules = [rule for pair in rules.items() for rule in _expand(*pair)]
        self.ignored = tuple(ignored)
        self.older = WeightMap(older) if older else None

    def plan(
        self,
        targets: Mapping[str, Shape],
        sources: Mapping[str, Shape],
        tied: Mapping[str, str] | None = None,
    ) -> Plan:
        """Finds the pieces of each target; each source must be used exactly once.

        Args:
            targets: Shapes of the tensors to make.
            sources: Shapes of the tensors that there are.
            tied: Second names of targets; tensors that the source has for them must be equal.
        """
        pieces, faults = {}, []
        for target, shape in targets.items():
            rules = self.pieces_of(target, sources)
            if len(rules) == 1:
                pieces[target] = rules[0]
                faults += _shape_faults(target, shape, pieces[target], sources)
            else:
                hint = "; only the same left side replaces an inherited rule" * (len(rules) > 1)
                faults.append(
                    f"{target} {list(shape)}: {len(rules)} rules match, 1 is needed{hint}"
                )
        copies = {
            (name, target): parts
            for name, target in (tied or {}).items()
            for parts in self.pieces_of(name, sources)
            if parts != pieces.get(target) and any(piece.name in sources for piece in parts)
        }
        for (name, target), parts in copies.items():
            faults += _shape_faults(name, targets[target], parts, sources)
        used = chain.from_iterable((*pieces.values(), *copies.values()))
        return Plan(targets, pieces, copies, faults + self._use_faults(used, sources))

    def pieces_of(self, target: str, sources: Container[str]) -> list[list[TensorPart]]:
        """Parts that each rule for a target joins, by their names in the release of the sources."""
        return [
            [self._in(sources, TensorPart.parse(_numbered(name, match))) for name in names]
            for pattern, names in self.rules
            if (match := pattern.fullmatch(target))
        ]

    def _in(self, sources: Container[str], piece: TensorPart) -> TensorPart:
        """A piece, or its form in an older release if the source comes from such a one."""
        if self.older is None or piece.name in sources:
            return piece
        older = (one for (one,) in self.older.pieces_of(piece.name, sources))
        return next((one for one in older if one.name in sources), piece)

    def _use_faults(self, used: Iterable[TensorPart], sources: Mapping[str, Shape]) -> list[str]:
        uses: dict[str, list[TensorPart]] = defaultdict(list)
        for piece in used:
            uses[piece.name].append(piece)
        faults = []
        for name, shape in sources.items():
            parts = uses[name]
            cuts = {(one.blocks, one.transposed) for one in parts}
            is_ignored = any(fnmatchcase(name, one) for one in self.ignored)
            # Blocks of one size cannot share rows.
            if len(cuts) > 1 or len({*parts}) < len(parts):
                faults.append(f"{name} is used more than once")
            elif len(parts) != (parts[0].blocks if parts else 1) and not is_ignored:
                faults.append(
                    f"{name} {list(shape)} is used {'in part' if parts else 'by no rule'}"
                )
        return faults


def take_apart(
    pieces: Mapping[str, list[TensorPart]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that were joined to others, in memory of their own: a plan carried out backwards.

    Pieces of one tensor have equally many rows. The tensors may be some of the joined ones.
    """
    return {
        piece.name: (part.T if piece.transposed else part).clone(
            memory_format=torch.contiguous_format
        )
        for joined, tensor in tensors.items()
        for piece, part in zip(pieces[joined], tensor.chunk(len(pieces[joined])), strict=True)
    }


def untied_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors by name, each once."""
    tied = model.all_tied_weights_keys
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _rule_faults(target: str, source: str | list[str]) -> Iterator[str]:
    """Faults of a rule as it is written."""
    texts = source if isinstance(source, list) else [source]
    for text in (target, *texts):
        if not isinstance(text, str) or re.search(r"[{}]", _BRACES.sub("", text)) or not text:
            yield (
                f"{text!r} must be the name of a tensor, with pairs of braces as in "
                f"layers.{{i}}.norm.{{weight,bias}}, in the rule for {target!r}"
            )
            return
    numbers = _NUMBER.findall(target)
    if len(set(numbers)) < len(numbers):
        yield f"{target!r} must have each number in braces once; give them different names"
    for text in texts:
        unknown = sorted(set(_NUMBER.findall(text)) - set(numbers))
        if unknown:
            yield (
                f"{text!r} must have numbers of its target {target!r} only, got "
                f"{', '.join(f'{{{name}}}' for name in unknown)}"
            )
        for alternative in _alternatives(text):
            try:
                TensorPart.parse(alternative)
            except ValueError as error:
                yield str(error)


def _expand(target: str, source: str | list[str]) -> Iterable[tuple[re.Pattern[str], list[str]]]:
    """A rule for each alternative of the target: its pattern, and the sources to join."""
    sources = source if isinstance(source, list) else [source]
    braces = list(dict.fromkeys(_ALTERNATIVES.findall(target)))
    for choice in itertools.product(*(brace[1:-1].split(",") for brace in braces)):
        texts = [target, *sources]
        for brace, word in zip(braces, choice, strict=True):
            texts = [text.replace(brace, word) for text in texts]
        filled, *texts = texts
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(filled))
        yield re.compile(pattern), [one for text in texts for one in _alternatives(text)]


def _alternatives(text: str) -> list[str]:
    """A text for each choice among the words in its braces."""
    choices = [
        part[1:-1].split(",") if _ALTERNATIVES.fullmatch(part) else [part]
        for part in _ALTERNATIVES.split(text)
    ]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbered(text: str, match: re.Match[str]) -> str:
    """The text with the numbers of a target in place of their braces."""
    return _NUMBER.sub(lambda found: str(int(match[found[1]]) + ("+" in found[0])), text)


def _shape_faults(
    target: str, shape: Shape, pieces: list[TensorPart], sources: Mapping[str, Shape]
) -> list[str]:
    missing = [piece.name for piece in pieces if piece.name not in sources]
    if missing:
        return [f"{target} {list(shape)}: the source has no {', '.join(missing)}"]
    cut = [piece.shape(sources[piece.name]) for piece in pieces]
    if all(cut) and len({one[1:] for one in cut}) == 1:
        joined = (sum(one[0] for one in cut), *cut[0][1:])
        # Some classes have biases of the logits in one row.
        if joined in (shape, (1, *shape)):
            return []
    names = ", ".join(f"{piece.name} {list(sources[piece.name])}" for piece in pieces)
    return [f"{target} must be {list(shape)}, got {names}"]
