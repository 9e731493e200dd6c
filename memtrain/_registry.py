"""Named entries of one kind: ours, those registered in process, and those of other packages.

Entry points make a package's entries visible without importing it: the group is
``memtrain.<kind>`` and the entry-point name is the registry name. A plugin that fails to import is
recorded and shown by ``memtrain list`` and ``memtrain doctor``; the failure is raised only when
that entry is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ._errors import MemtrainError, PluginError, UnknownNameError, did_you_mean

T = TypeVar("T")

#: The distribution name shown as the source of the entries that ship with memtrain.
OURS = "memtrain"


@dataclass(frozen=True)
class Entry:
    """One row of a registry. Reading a row imports nothing.

    Args:
        name: The name used in recipes and on the command line.
        target: ``"module:attribute"``, resolved on first use; empty for in-process entries.
        source: The distribution that provides the entry (``memtrain`` for ours).
        version: That distribution's version.
        summary: One line for ``memtrain list``.
    """

    name: str
    target: str
    source: str = OURS
    version: str = ""
    summary: str = ""


@dataclass
class Registry(Generic[T]):
    """Entries of one kind, looked up by name.

    Args:
        kind: Plural, as in ``memtrain list compressors``; entry points use ``memtrain.<kind>``.
        builtin: Our own entries, as name -> (target, summary).
    """

    kind: str
    builtin: dict[str, tuple[str, str]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _objects: dict[str, T] = field(default_factory=dict)
    _scanned: bool = False

    @property
    def singular(self) -> str:
        """For messages: ``compressor``, ``family``."""
        return self.kind[:-3] + "y" if self.kind.endswith("ies") else self.kind.removesuffix("s")

    def register(self, name: str, *, summary: str = "") -> Callable[[T], T]:
        """Decorator that adds an object of this process under ``name``.

        Raises:
            MemtrainError: The name is taken; both sources are named.
        """

        def add(obj: T) -> T:
            self._scan()
            module = getattr(obj, "__module__", "?")
            text = summary or (getattr(obj, "__doc__", None) or "").strip().split("\n")[0]
            self._add(Entry(name, "", source=f"{module} (in process)", summary=text))
            self._objects[name] = obj
            return obj

        return add

    def unregister(self, name: str) -> None:
        """Removes an entry added by `register`; for tests and notebooks that redefine a class."""
        self._entries.pop(name, None)
        self._objects.pop(name, None)

    def entries(self) -> list[Entry]:
        """All rows, sorted by name, without importing any of them."""
        self._scan()
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def names(self) -> list[str]:
        """All names, sorted."""
        return [entry.name for entry in self.entries()]

    def __contains__(self, name: object) -> bool:
        self._scan()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def entry(self, name: str) -> Entry:
        """The row of ``name``.

        Raises:
            UnknownNameError: No such entry; the nearest name and all names are given.
        """
        self._scan()
        if name not in self._entries:
            what = self.singular
            raise UnknownNameError(f"Unknown {what} {name!r}. {did_you_mean(name, self.names())}")
        return self._entries[name]

    def get(self, name: str) -> T:
        """The object of ``name``, imported now if it was not before.

        Raises:
            UnknownNameError: No such entry.
            PluginError: Its module cannot be imported.
        """
        entry = self.entry(name)
        if name not in self._objects:
            module_name, _, attribute = entry.target.partition(":")
            try:
                found = importlib.import_module(module_name)
                for part in filter(None, attribute.split(".")):
                    found = getattr(found, part)
            except MemtrainError:
                raise  # e.g. a missing extra: already says what to install
            except Exception as error:
                self.broken[name] = f"{type(error).__name__}: {error}"
                raise PluginError(
                    f"The {self.singular} {name!r} of {entry.source} "
                    f"{entry.version} ({entry.target}) cannot be imported: "
                    f"{self.broken[name]}. Fix or uninstall that package."
                ) from error
            self._objects[name] = found  # type: ignore[assignment]
        return self._objects[name]

    def check(self) -> dict[str, str]:
        """Imports every entry and returns name -> error for the broken ones."""
        for name in self.names():
            try:
                self.get(name)
            except MemtrainError as error:
                self.broken.setdefault(name, str(error))
        return dict(self.broken)

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        version = _version(OURS)
        for name, (target, summary) in self.builtin.items():
            self._add(Entry(name, target, OURS, version, summary))
        for point in importlib.metadata.entry_points(group=f"memtrain.{self.kind}"):
            dist = point.dist
            source = dist.name if dist is not None else "?"
            entry = Entry(point.name, point.value, source, dist.version if dist else "")
            if point.name in self._entries:
                # One bad plugin must not take the others down: record it instead of raising.
                self.broken[f"{point.name} ({source})"] = self._taken(entry)
                continue
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        if entry.name in self._entries:
            raise MemtrainError(self._taken(entry))
        self._entries[entry.name] = entry

    def _taken(self, entry: Entry) -> str:
        other = self._entries[entry.name]
        return (
            f"The {self.singular} name {entry.name!r} of {entry.source} is already "
            f"taken by {other.source}. Rename one of the two entries."
        )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


compressors: Registry = Registry(
    "compressors",
    {
        name: (f"memtrain.compressors.{name}:{cls}", summary)
        for name, cls, summary in (
            ("none", "NoCompressor", "Keeps what autograd saves as it is."),
            ("attention", "Attention", "Exact: keeps q, k and v, and attends again."),
            ("bitmask", "Bitmask", "Exact: 1 bit for ReLU outputs, masks and two-valued floats."),
            ("window_index", "WindowIndex", "Exact: the indices of max pooling, 1 to 8 bits."),
            ("narrow_int", "NarrowInt", "Exact: integers in the smallest type that holds them."),
            ("blockwise", "Blockwise", "Unbiased 1-8 bit block quantisation, the same for all."),
            ("gact", "Gact", "Block quantisation with bits per tensor chosen at run time."),
            ("offload", "Offload", "Moves saved tensors to host memory or to disk."),
            ("shape_only", "ShapeOnly", "Exact: nothing, where the backward only asks a shape."),
            ("planned", "Planned", "What a byte budget resolves to: an action for every tensor."),
            ("recompute", "Recompute", "Activation checkpointing of whole blocks, the baseline."),
        )
    },
)

families: Registry = Registry(
    "families",
    {
        "gnn": (
            "memtrain.families.gnn:Gnn",
            "GCN, GAT, GraphSAGE and GCNII on node classification.",
        ),
        "transformer": (
            "memtrain.families.transformer:Transformer",
            "GPT-2, Llama and BERT on bytes, tokens and classification.",
        ),
        "cnn": (
            "memtrain.families.cnn:Cnn",
            "ResNet, VGG and EfficientNet-Lite0 on images.",
        ),
    },
)

datasets: Registry = Registry(
    "datasets",
    {
        name: (f"memtrain.data.graphs:{attribute}", summary)
        for name, attribute, summary in (
            ("pubmed", "PubMed", "Citation graph, 19,717 nodes, 3 classes, public split."),
            ("citeseer", "CiteSeer", "Citation graph, 3,327 nodes, 6 classes, public split."),
            ("cora", "Cora", "Citation graph, 2,708 nodes, 7 classes, random split."),
            ("blogcatalog", "BlogCatalog", "Social graph, 10,312 nodes, 333,983 edges."),
            ("wordnet", "WordNet", "Synsets and their relations, 117,659 nodes, 45 classes."),
            ("sbm", "StochasticBlockModel", "Generated; needs no download; any size."),
        )
    }
    | {
        name: (f"memtrain.data.{target}", summary)
        for name, target, summary in (
            ("enwik8", "text:Enwik8", "100 MB of Wikipedia as bytes; split 90 / 5 / 5."),
            ("text", "text:TextFiles", "Your own files as bytes: data.path=FILE."),
            ("markov", "text:Markov", "Generated bytes of known entropy; needs no download."),
            ("newsgroups", "text:Newsgroups", "20 Newsgroups, 18,821 texts, 20 classes."),
            ("sentiment", "text:Sentiment", "10,072 sentences of film reviews, 2 classes."),
            ("topics", "text:Topics", "Generated texts with classes; needs no download."),
            ("minilm", "weights:MiniLm", "Weights, not data: family.pretrained=minilm."),
            ("smollm2", "weights:SmolLm2", "Weights, not data: family.pretrained=smollm2."),
            ("fashion_mnist", "images:FashionMnist", "70,000 grey 28x28 images, 10 classes."),
            ("digits", "images:Digits", "1,797 grey 8x8 digits of scikit-learn; no download."),
            ("image_folder", "images:ImageFolder", "Your own images by class: data.path=FOLDER."),
            ("images_generated", "images:GeneratedImages", "Generated stripes of any size."),
            (
                "efficientnet_lite0",
                "images:EfficientNetLite0Weights",
                "Weights, not data: family.pretrained=efficientnet_lite0.",
            ),
        )
    },
)

optimizers: Registry = Registry(
    "optimizers",
    {
        "adam": ("torch.optim:Adam", "Adam (Kingma and Ba, 2015)."),
        "adamw": ("torch.optim:AdamW", "Adam with decoupled weight decay."),
        "sgd": ("torch.optim:SGD", "Stochastic gradient descent with momentum."),
    },
)

#: Torch function name -> the `memtrain.derivations.Derivation` that repeats it.
derivations: Registry = Registry(
    "derivations",
    {
        function: (f"memtrain.derivations:{attribute}", "Derived from its input when unpacked.")
        for attribute, functions in {
            "batch_norm": ("batch_norm",),
            "layer_norm": ("layer_norm",),
            "relu": ("relu", "relu_"),
            "dropout": ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
            "leaky_relu": ("leaky_relu", "leaky_relu_"),
            "relu6": ("relu6",),
            "hardtanh": ("hardtanh", "hardtanh_"),
            "max_pool1d": ("max_pool1d",),
            "max_pool2d": ("max_pool2d",),
            "max_pool3d": ("max_pool3d",),
            "pad": ("pad",),
            "gelu": ("gelu",),
            "silu": ("silu",),
            "elu": ("elu",),
            "softplus": ("softplus",),
            "tanh": ("tanh",),
            "sigmoid": ("sigmoid",),
            "power": ("pow", "__pow__"),
            "square": ("square",),
            "neg": ("neg", "__neg__"),
            "rsub": ("rsub", "__rsub__"),
            "add": ("add", "add_"),
            "sub": ("sub", "sub_"),
            "mul": ("mul", "mul_"),
            "index_select": ("index_select",),
            "cast": ("to", "float", "bfloat16", "half", "type"),
        }.items()
        for function in functions
    },
)

recipes: Registry = Registry("recipes")

#: Every registry by kind, for ``memtrain list`` and `memtrain.register`.
REGISTRIES: dict[str, Registry] = {
    registry.kind: registry
    for registry in (compressors, derivations, families, datasets, optimizers, recipes)
}


def register(kind: str, name: str, *, summary: str = "") -> Callable[[T], T]:
    """Decorator: ``@memtrain.register("compressors", "mine")``.

    Raises:
        UnknownNameError: There is no such kind.
        MemtrainError: The name is taken.
    """
    if kind not in REGISTRIES:
        raise UnknownNameError(f"Unknown registry {kind!r}. {did_you_mean(kind, REGISTRIES)}")
    return REGISTRIES[kind].register(name, summary=summary)
