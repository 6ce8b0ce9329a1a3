"""What happens to uploads on their way from the clients to the server."""

from __future__ import annotations

from dataclasses import replace

from fedbench.contract.uploads import Uploads
from fedbench.parts.secure_sum import masked_sum


def sealed(uploads: Uploads, seed: int, when: int) -> Uploads:
    """What reaches the server: uploads in `summed` are gone but for the sum of the clients' masked parts."""
    if not uploads.summed:
        return uploads
    clients = uploads.clients.cpu().numpy()
    sums = {name: masked_sum(uploads.dense(name), clients, seed, when) for name in uploads.summed if name in uploads.tensors}
    return replace(uploads, tensors={name: value for name, value in uploads.tensors.items() if name not in sums}, sums=sums)
