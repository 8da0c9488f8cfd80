"""Writes the bill of materials of an image (CycloneDX 1.6, JSON) from the locks; needs no container tool.

python -m scripts.sbom router|node|vllm --device cpu|cuda --base IMAGE[@sha256:DIGEST] [--debian FILE] -o FILE

FILE of --debian lists the image's Debian packages, "NAME VERSION ARCHITECTURE" a line, as scripts/images.sh takes
them from the built image. Without it the bill lacks them. The same inputs give the same bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from pdcluster.core.version import VERSION
from scripts.image_packages import IMAGE_LOCKS, ROOT, TORCH_INDEX, LockedPackage, image_packages

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/pdcluster")


def python_component(package: LockedPackage) -> Component:
    """A package of PyPI, or torch's CPU build, with the hash of each file that the lock allows."""
    is_of_pypi = package.version == package.public_version
    index = "https://pypi.org/simple" if is_of_pypi else TORCH_INDEX
    qualifiers = None if is_of_pypi else {"repository_url": index}
    purl = PackageURL(type="pypi", name=package.name, version=package.version, qualifiers=qualifiers)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"{index}/{package.name}/"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in package.hashes],
    )
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=purl,
        bom_ref=str(purl),
        external_references=[files],
    )


def base_component(base: str) -> Component:
    """The base image; its version is the digest, or the tag where no digest was named."""
    tagged, _, digest = base.partition("@")
    repository, tag = (*re.split(r":(?=[^/]*$)", tagged), "latest")[:2]
    purl = None
    if digest:
        qualifiers = {"repository_url": repository, "tag": tag}
        purl = PackageURL(type="oci", name=repository.rpartition("/")[2], version=digest, qualifiers=qualifiers)
    return Component(
        type=ComponentType.CONTAINER, name=repository, version=digest or tag, purl=purl, bom_ref=f"base:{base}"
    )


def debian_components(lines: Iterable[str]) -> list[Component]:
    found = []
    for line in filter(str.strip, lines):
        if len(words := line.split()) != 3:
            raise ValueError(f"a Debian package is NAME VERSION ARCHITECTURE, not {line.strip()!r}")
        name, version, architecture = words
        purl = PackageURL(type="deb", namespace="debian", name=name, version=version, qualifiers={"arch": architecture})
        found.append(Component(type=ComponentType.LIBRARY, name=name, version=version, purl=purl, bom_ref=str(purl)))
    return found


def bill(image: str, device: str, base: str, debian: Iterable[str] = ()) -> Bom:
    """The image depends on pdcluster and its base, pdcluster on the Python packages. No lock says which needs which."""
    root = Component(
        type=ComponentType.CONTAINER, name=f"pdcluster/{image}", version=VERSION, bom_ref=f"image:{image}:{device}"
    )
    license_id = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    own = Component(
        type=ComponentType.APPLICATION,
        name="pdcluster",
        version=VERSION,
        bom_ref="pdcluster",
        licenses=[DisjunctiveLicense(id=license_id)],
    )
    python = [python_component(each) for each in image_packages(image, device)]
    below, system = base_component(base), debian_components(debian)
    components = [own, below, *python, *system]
    number = uuid.uuid5(
        _NAMESPACE, "\n".join([str(root.bom_ref), VERSION, *(str(each.bom_ref) for each in components)])
    )
    # The library fills in the present time. A bill says what is in an image, not when it was written.
    metadata = BomMetaData(component=root)
    metadata.timestamp = None
    bom = Bom(components=components, metadata=metadata, serial_number=number)
    bom.register_dependency(root, [own, below, *system])
    bom.register_dependency(own, python)
    return bom


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sbom", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", choices=sorted({image for image, _ in IMAGE_LOCKS}))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--base", required=True, metavar="IMAGE")
    parser.add_argument("--debian", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(words)
    debian = options.debian.read_text().splitlines() if options.debian else ()
    bom = bill(options.image, options.device, options.base, debian)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    print(f"{options.output}: {len(bom.components)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
