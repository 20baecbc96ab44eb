"""Names of the files of a generation that hold no tensors."""

CERTIFICATE = "certificate.json"
LEASE_LOCK = "lease.lock"
