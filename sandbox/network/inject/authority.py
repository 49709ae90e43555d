"""The certificate authority of one run, for its hosts alone. Its gate's process makes it, and alone has its key."""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterable, Mapping
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

# The clocks of agent and gate are one machine's.
_BEFORE: Final = datetime.timedelta(hours=1)
_NAME_CHARACTERS: Final = 64  # X.520, ub-common-name


class Authority:
    """The authority, with a server's context for each of ``hosts``. Its certificates last ``seconds``."""

    def __init__(self, hosts: Iterable[str], *, seconds: int) -> None:
        names = sorted(hosts)
        now = datetime.datetime.now(datetime.UTC)
        self._times = now - _BEFORE, now + datetime.timedelta(seconds=seconds)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named("Covenant: authority of one run")
        self._certificate = self._made(names)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self.contexts: Mapping[str, ssl.SSLContext] = {name: self._context(name) for name in names}
        del self._key

    def _made(self, names: list[str]) -> x509.Certificate:
        usage = x509.KeyUsage(
            key_cert_sign=True,
            crl_sign=False,
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        within = x509.NameConstraints([x509.DNSName(name) for name in names], None)
        return (
            self._builder(self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(within, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        begins, ends = self._times
        return (
            x509.CertificateBuilder(self._subject, subject, key, x509.random_serial_number(), begins, ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = (
            self._builder(_named(host[:_NAME_CHARACTERS]), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        form = serialization.Encoding.PEM
        secret = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # No session is taken up again: each connection names its host, and is looked at.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        # OpenSSL takes a chain from a file alone: this one is in memory.
        fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(fd, secret + leaf.public_bytes(form))
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

        def judge(_: object, name: str | None, __: object) -> int | None:
            return None if name == host else int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)

        context.sni_callback = judge
        return context


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
