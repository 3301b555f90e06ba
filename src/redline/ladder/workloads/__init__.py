"""The bundled workloads, by name."""

from collections.abc import Callable

from redline.ladder.workload import Workload
from redline.ladder.workloads.drct import drct, drct_l
from redline.ladder.workloads.gpt import gpt, gpt_124m
from redline.ladder.workloads.resnet import resnet
from redline.ladder.workloads.unet import unet_100m, unet_390m, unet_880m
from redline.ladder.workloads.vit import vit

BUNDLED: dict[str, Callable[..., Workload]] = {
    function.__name__: function
    for function in (resnet, vit, unet_100m, unet_390m, unet_880m, gpt, gpt_124m, drct, drct_l)
}
