"""The command line: its table of commands, and the entry point.

A command's module is imported when the command runs, so that ``opcast --help`` stays fast and the
process is forked (:mod:`.guard`) before anything heavy is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from .guard import guarded, stopped_text
from .lazy import Command, Group, lazy_app
from .options import one_line

#: Status of a command that Ctrl-C ended, as shells report it.
_STOPPED = 128 + signal.SIGINT

REPORT = Group(
    "Write the page of a program, or figures on the models' accuracy.",
    {
        "program": Command(
            "report",
            "program",
            "Write an HTML page that shows a program's prediction.",
            examples=("opcast report program step.mlir --device h100-sxm --lowering fused",),
        ),
        "accuracy": Command(
            "report", "accuracy", "Print every model's accuracy beside the label noise."
        ),
        "devices": Command(
            "report", "devices", "Compare predictions for devices that are not attached."
        ),
        "clusters": Command(
            "report", "clusters", "Check collectives and training steps on clusters."
        ),
        "operators": Command(
            "report", "operators", "Compare estimators on published operator tables."
        ),
    },
    # Options of earlier versions, so that a familiar command line names its successor.
    former={
        "--accuracy": "accuracy",
        "--devices": "devices",
        "--programs": "devices",
        "--clusters": "clusters",
        "--published": "operators",
        "--study": "operators",
        "--family": "operators",
        "--data": "accuracy",
        "--out": "accuracy",
    },
    former_file="program",
)
PREDICT: dict[str, Command | Group] = {
    "predict": Command(
        "predict",
        "predict",
        "Predict a program's time and memory on a device or a cluster.",
        examples=(
            "opcast predict step.mlir --device h100-sxm --lowering fused",
            "opcast predict --op 'linear m=4096 n=4096 k=4096 dtype=fp8' --device l40s",
        ),
    ),
    "explain": Command(
        "predict",
        "explain",
        "Explain the predicted time of a program's kernels or an operator.",
        examples=(
            "opcast explain step.mlir --device h100-sxm --lowering fused --top 1",
            "opcast explain --op 'linear m=64 n=4096 k=4096 dtype=bf16' --device l4",
        ),
    ),
    "check": Command(
        "calibrate",
        "check",
        "Compare predicted with measured times, kernel by kernel.",
    ),
    "lower": Command(
        "lower",
        "lower",
        "Lower a program to the kernels of a device.",
        examples=("opcast lower step.mlir --device h100-sxm --lowering fused",),
    ),
    "partition": Command(
        "lower",
        "partition",
        "Partition a program over a mesh or along its own shardings, with explicit collectives.",
        examples=("opcast partition step.mlir --mesh dp=4 --out step4.mlir",),
    ),
    "plan": Command(
        "sweep", "plan", "Search meshes and shardings of any program for the best on a cluster."
    ),
    "tune-kernel": Command(
        "fidelities", "tune_kernel", "Rank implementations and tile configurations of kernels."
    ),
    "compilers": Group(
        "Manage compilers of devices that are not attached.",
        {
            "install": Command("lower", "install", "Install compilers that match this jaxlib."),
            "list": Command("lower", "list_compilers", "List the installed compilers."),
        },
    ),
}
CLUSTERS: dict[str, Command | Group] = {
    "simulate": Command(
        "simulate",
        "simulate",
        "Predict one training step on a cluster: time, memory, efficiency.",
        examples=(
            "opcast simulate --workload llama-3-8b --set batch=16,seq=4096 \\\n"
            "    --cluster dgx-h100-x16 --plan tp=8,dp=2",
        ),
    ),
    "sweep": Command(
        "sweep",
        "sweep",
        "Evaluate many parallel plans and print the Pareto front.",
        examples=(
            "opcast sweep --workload llama-3-8b --set batch=64,seq=4096 \\\n"
            "    --cluster dgx-h100-x16 --grid tp=4/8,pp=1/2 --out plans",
        ),
    ),
    "simulate-serving": Command(
        "serving",
        "simulate_serving",
        "Simulate LLM serving: latencies, throughput, memory, cache and queue.",
        examples=(
            "opcast simulate-serving --workload llama-3-8b --device h100-sxm \\\n"
            "    --rate 4 --slo ttft=500ms,tpot=30ms",
        ),
    ),
    "plan-serving": Command(
        "serving",
        "plan_serving",
        "Search engines, plans, batches and disaggregation for the cheapest under an SLO.",
        examples=(
            "opcast plan-serving --model llama-3-8b --device h100-sxm --gpus 2 \\\n"
            "    --load concurrency=16,prompt=512,output=64,count=64 --slo tpot=30ms",
        ),
    ),
    "cluster": Command(
        "cluster",
        "cluster",
        "Print a cluster: its network, collective times and sources.",
        examples=(
            "opcast cluster dgx-h100-x16",
            "opcast cluster dgx-h100-x16 --save mine.yaml",
        ),
    ),
    "calibrate-collectives": Command(
        "cluster", "calibrate_collectives", "Fit the collective model to measurements."
    ),
}
DATA: dict[str, Command | Group] = {
    "device": Command(
        "device",
        "device",
        "Measure this device, or print a known device or the catalogue.",
        examples=(
            "opcast device h100-sxm",
            "opcast device --list",
        ),
    ),
    "profile": Command(
        "device", "profile", "Measure kernels and programs on a device into a dataset."
    ),
    "zoo": Group(
        "List and export the zoo's workloads.",
        {
            "list": Command("data", "zoo_list", "List the workload families and their settings."),
            "export": Command(
                "data",
                "zoo_export",
                "Write a workload as StableHLO.",
                examples=("opcast zoo export mlp --set batch=64 --set mode=train --out step.mlir",),
            ),
        },
    ),
    "data": Group(
        "Inspect, import and generate datasets.",
        {
            "show": Command(
                "data",
                "data_show",
                "Summarise a dataset: counts, ranges, noise.",
                examples=("opcast data show data",),
            ),
            "import": Command(
                "data", "data_import", "Convert published latency tables or traces into a dataset."
            ),
            "compile": Command(
                "data", "data_compile", "Collect the TPU compiler's estimates of kernels."
            ),
            "agree": Command(
                "data", "data_agree", "Compare the TPU compiler's estimates with a model's."
            ),
            "simulate": Command(
                "fidelities", "data_simulate", "Label the kernels of programs with a simulator."
            ),
        },
    ),
    "audit": Command(
        "data",
        "audit",
        "Find rows of measured tables that are impossible, or that others contradict.",
    ),
    "train": Command(
        "train",
        "train",
        "Train a model, print its metrics, save and track it.",
        examples=("opcast train --data data --model ridge --split random --register mine",),
    ),
    "tune": Command("train", "tune", "Search for a model's hyperparameters by cross-validation."),
    "calibrate": Command(
        "calibrate", "calibrate", "Adapt a model to a device from few, actively chosen samples."
    ),
    "drift": Command(
        "calibrate", "drift", "Say how stale a model is on new measurements, and repair it."
    ),
    "evaluate": Command(
        "train",
        "evaluate",
        "Predict published tables of operators, steps, serving or programs and print the errors.",
    ),
    "compare": Command(
        "train",
        "compare",
        "Print tracked runs side by side.",
        examples=("opcast compare",),
    ),
    "models": Command(
        "train",
        "models",
        "List the available models, or print a model card.",
        examples=(
            "opcast models",
            "opcast models gpu-operators",
        ),
    ),
}
TOOLS: dict[str, Command | Group] = {
    "demo": Command(
        "train", "demo", "Predict for absent chips, calibrate to this machine, test, track."
    ),
    "report": REPORT,
    "serve": Command("serve", "serve", "Serve predictions over HTTP."),
    "ui": Command("train", "ui", "Open MLflow's user interface on the runs tracked here."),
    "export": Group(
        "Write files for other simulators.",
        {
            "chakra": Command(
                "export", "export_chakra", "Write Chakra traces and ASTRA-sim's input files."
            ),
            "table": Command(
                "export",
                "export_table",
                "Write latencies of operators and kernels as a table.",
                examples=(
                    "opcast export table --op 'linear m=1/64 n=4096 k=4096 dtype=bf16' \\\n"
                    "    --device h100-sxm --device b200 --out table.csv",
                ),
            ),
            "llmservingsim": Command(
                "export", "export_llmservingsim", "Write LLMServingSim's table of layers."
            ),
            "simai": Command(
                "export", "export_simai", "Write SimAI's workload of a training step."
            ),
            "calculon": Command(
                "export",
                "export_calculon",
                "Write a cluster as Calculon's system.",
                examples=("opcast export calculon --cluster dgx-h100-x16 --out system.json",),
            ),
            "xla-perf-table": Command(
                "export",
                "export_xla_perf_table",
                "Write the tables of products and collectives that XLA's scheduler reads.",
            ),
            "vidur": Command(
                "export", "export_vidur", "Write the tables that Vidur's random forests train on."
            ),
        },
    ),
    "import": Group(
        "Read files of other simulators.",
        {"chakra": Command("export", "import_chakra", "Read Chakra traces and replay them.")},
    ),
    "hespas": Command(
        "export",
        "hespas",
        "Run HESPAS with opcast as its estimator.",
        # Everything after the configuration belongs to HESPAS.
        {"ignore_unknown_options": True},
    ),
    "fidelities": Command(
        "fidelities", "fidelities", "Rank-correlate estimators over the zoo's programs."
    ),
}
PANELS = {
    "Predict a program": PREDICT,
    "Clusters and serving": CLUSTERS,
    "Data and models": DATA,
    "Tools": TOOLS,
}
COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}

app = lazy_app(
    Group(
        "Predict how long an ML program takes on a device, why, and how sure that is.",
        COMMANDS,
        panels=PANELS,
    ),
    name="opcast",
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"opcast {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict how long an ML program takes on a device, why, and how sure that is."""


def main() -> NoReturn:
    """Run the command line: one line on stderr and status 1 for every error."""
    # Forks before anything heavy is imported: the copy is cheap, and no thread runs yet.
    guarded(sys.argv[1:], _main)
    raise SystemExit(0)


def _main() -> NoReturn:
    from ..common.errors import OpcastError, fault
    from ..models.estimators.xgboost_import import own_process

    # This process is opcast's own, so XGBoost may be imported without scikit-learn.
    own_process()
    try:
        app(standalone_mode=True)
    except OpcastError as error:
        sys.stderr.write(f"opcast: error: {one_line(error)}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(stopped_text(sys.argv[1:]))
        raise SystemExit(_STOPPED) from None
    except SystemExit as end:
        # Typer ends a command so on Ctrl-C, without a word.
        if end.code == _STOPPED:
            sys.stderr.write(stopped_text(sys.argv[1:]))
        raise
    except Exception as error:
        if os.environ.get("OPCAST_TRACEBACK"):
            raise
        sys.stderr.write(f"opcast: error: {one_line(fault(error))}\n")
        raise SystemExit(1) from None
    raise SystemExit(0)
