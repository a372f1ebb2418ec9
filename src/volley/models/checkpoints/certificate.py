"""Reader of the certificate beside a drafter (``certificate.json``, written by ``volley certify``), which checks its digest."""

import hashlib
import json
from pathlib import Path
from typing import Any

from volley.errors import CheckpointError
from volley.files import read_json


def digest(body: dict[str, Any]) -> str:
    """Return the digest of everything in a certificate but the digest itself."""
    rest = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_certificate(path: Path) -> dict[str, Any]:
    """Read the certificate in a file; an error if it was changed after it was written."""
    found = read_json(path)
    if found.get("sha256") != digest(json.loads(json.dumps(found))):
        raise CheckpointError(f"{path} was changed after it was written; run volley certify again")
    return found
