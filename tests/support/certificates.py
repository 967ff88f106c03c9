"""Throw-away certificates for TLS on the loopback interface."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Makes a key and a certificate for 127.0.0.1 in a folder, and returns their files."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    _openssl(f"req -x509 {_NEW_KEY} -days 1", *names, *files)
    return key, certificate


class Authority:
    """A certificate authority in a new folder, and the certificates that it issues there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.certificate = folder / "ca.pem"
        """Its own certificate."""
        self._key = folder / "ca.key"
        names = ["-subj", f"/CN={folder.name}"]
        files = ["-keyout", str(self._key), "-out", str(self.certificate)]
        _openssl(f"req -x509 {_NEW_KEY} -days 1", *names, *files)

    def issue(self, name: str, *, days: int = 1) -> tuple[Path, Path]:
        """Makes a key and a certificate for 127.0.0.1; with -1 days it has expired."""
        key, certificate = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        request, extensions = self._folder / f"{name}.csr", self._folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        files = ["-keyout", str(key), "-out", str(request)]
        _openssl(f"req -new {_NEW_KEY}", "-subj", f"/CN={name}", *files)
        signer = ["-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"]
        files = ["-in", str(request), "-extfile", str(extensions), "-out", str(certificate)]
        _openssl(f"x509 -req -days {days}", *signer, *files)
        return key, certificate


def _openssl(words: str, *more: str) -> None:
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
