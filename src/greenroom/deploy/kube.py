"""`greenroom generate kube`: an intent as files for Kubernetes, in one of three forms."""

from __future__ import annotations

from greenroom.deploy import containerfile
from greenroom.deploy.helm import chart
from greenroom.deploy.intent import Files, Intent
from greenroom.deploy.kube_loader import loader
from greenroom.deploy.kube_objects import settled
from greenroom.deploy.kube_pod import KubeOptions
from greenroom.deploy.kustomize import kustomize, plain
from greenroom.deploy.unfit import Unfit

FORMATS = {"kustomize": kustomize, "helm": chart, "plain": plain}


def kube(intent: Intent, form: str = "kustomize", options: KubeOptions | None = None) -> Files:
    """The same bytes for the same intent; Unfit where it cannot be written."""
    if form not in FORMATS:
        raise Unfit(f"there is no form {form!r} for Kubernetes: it is one of {', '.join(FORMATS)}")
    options = options or KubeOptions.of(intent.options)
    intent = settled(intent)
    if form == "plain":  # nothing beside it, so that it can go through a pipe
        return plain(intent, options)
    built = {containerfile.FILE: intent.builds} if intent.builds else {}
    return dict(sorted({**FORMATS[form](intent, options), **loader(intent, options), **built}.items()))
