"""What is done with every code block of README.md, docs/ and papers/docs/, page by page in the order of the blocks."""

from collections.abc import Mapping

from tests.docs.blocks import Elsewhere, Not, Run, Treatment

STAYS = "it goes on until it is stopped; tests/system/test_service.py starts it"
INSTALLS = "it installs; every run of the gate begins with it"
TORCHRUN = "tests/test_cli.py runs a command over two ranks of such a torchrun"
MPIEXEC = "tests/comm/test_mpi.py and tests/rank/test_engine.py start ranks by mpiexec"
SEVERAL_HOSTS = "it needs several hosts; tests/system/test_two_hosts.py runs two network namespaces"
GATE = "it is the gate itself, or a part of it that takes minutes"
URL = "--url http://127.0.0.1:8000"
DRAWING = Not("a drawing")
SMALLER = {"9000000": "9000", "5242880": "5242"}
BREAKS_OFF = {"--data-binary @book.txt      # breaks off": "--data-binary @begun.txt"}

CLASSIFIER = """
import torch
from torch.nn import functional as F
from dist_attn.comm import open_communicator
from dist_attn.layout import SequenceLayout
from dist_attn.models import TextClassifierConfig, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
mixer = {"kind": "bidirectional", "attention": "elu", "hidden_size": 16, "num_heads": 2}
encoder = {"hidden_size": 16, "num_layers": 1, "mlp_size": 16, "mixer": mixer}
values = {"vocab_size": 20, "num_classes": 2, "pooling": "class_token", "encoder": encoder}
model, comm = build_model(TextClassifierConfig.model_validate(values)), open_communicator()
tokens, classes = torch.zeros(1, 12, dtype=torch.int64), torch.tensor([1])
texts = [torch.zeros(5, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]
"""

BLOCKS: Mapping[str, tuple[Treatment, ...]] = {
    "README.md": (Not(STAYS), Run("shell")),
    "CONTRIBUTING.md": (Not(INSTALLS), Not(GATE)),
    "docs/adding-a-mixer.md": (*[Elsewhere("tests/mixers/test_adding_a_mixer.py")] * 3,),
    "docs/adding-an-operation.md": (Elsewhere("tests/sharded/test_adding_an_operation.py"),),
    "docs/architecture.md": (Elsewhere("tests/test_habits.py"), DRAWING),
    "docs/how-to/train-your-model.md": (
        Elsewhere("tests/adapters/test_context_parallel_processes.py"),
        *[Elsewhere("tests/training/test_folder_task.py")] * 2,
        Elsewhere("tests/adapters/test_context_parallel_processes.py"),
        Elsewhere("tests/adapters/test_trainer.py"),
    ),
    "docs/how-to/client.md": (
        Run("python", says=(" tokens",)),
        Run(
            "python",
            before="from dist_attn_client import AsyncClient",
            instead={"https://example.org": "http://127.0.0.1:8000"},
        ),
    ),
    "docs/reference/command-line.md": (
        Run("shell"),
        Run(
            "shell",
            leave={"dist-attn top   ": "it goes on until Ctrl-C; tests/test_cli_remote.py has it on a terminal"},
            instead={"top --once": f"top --once {URL}", "top --json": f"top --once --json {URL}"},
        ),
        Run("shell", leave={"dist-attn --install-completion": "it writes into the shell's start files"}),
    ),
    "docs/how-to/converting.md": (
        Run("shell", before="minilm"),
        Elsewhere("tests/test_hf.py"),
        Not("lm-evaluation-harness is no dependency and its tasks are downloaded; tests/test_hf.py loads as it does"),
    ),
    "docs/decisions/README.md": (Not("a form to be copied"),),
    "docs/how-to/compose.md": (
        Not("it needs Docker; tests/deploy/test_compose.py checks the file"),
        Not("it needs Docker; tests/deploy/test_dockerfiles.py checks the files"),
    ),
    "docs/explanation/carry.md": (Run("python", says=("the last state is everywhere: True",)),),
    "docs/how-to/corpora.md": (
        Not("tests/commands/test_corpus.py encodes and searches other documents"),
        Elsewhere("tests/commands/test_corpus.py"),
        Not("it needs three databases"),
    ),
    "docs/how-to/gpus.md": (
        Not("it needs a GPU"),
        Not("it needs four GPUs"),
        Not("it needs a GPU; `make gpu` has both, in its pieces ranks and killed"),
        Elsewhere("tests/commands/test_compile_kernels.py"),
        Run("python", instead={"4096, (1, 4096)": "4096, (1, 512)", "even(4096": "even(512"}),
        Not("it needs four GPUs, and a rank that hangs"),
        Elsewhere("tests/benchmarks/test_gpu_check.py"),
    ),
    "docs/how-to/kubernetes.md": (Not("it needs a cluster; tests/deploy/test_kubernetes.py checks the manifests"),),
    "docs/how-to/many-processes.md": (
        Not("tests/commands/test_local_ranks.py runs it over two ranks"),
        Not(SEVERAL_HOSTS),
        Not(TORCHRUN),
        Not(f"{INSTALLS}; {MPIEXEC}"),
        Not(SEVERAL_HOSTS),
        Run("syntax"),
        Run("syntax"),
    ),
    "docs/how-to/operate.md": (
        Not("it goes on until it is stopped; tests/system/test_two_models.py starts it"),
        Not("processes that go on until they are stopped; tests/service/test_process.py starts the API"),
        Not("it needs engines on other hosts; tests/system/test_several_engines.py starts two"),
        Not("it stops a service of the system"),
        Not("a configuration of logrotate"),
        Not("a part of nginx.conf; tests/deploy/test_nginx.py runs the whole example"),
    ),
    "docs/how-to/own-model.md": (
        Run(
            "shell",
            leave={"dist-attn serve": STAYS},
            instead={
                "run.steps=200": "run.steps=1 --set data.batch=1 --set data.segment=32",
                "--max-tokens 50": "--max-tokens 3",
            },
        ),
    ),
    "docs/how-to/secure.md": (
        Run(
            "shell",
            leave={"DIST_ATTN_HTTP__API_KEYS_FILE": f"{STAYS}; tests/service/test_keys.py has keys from a file"},
        ),
        Run("shell", leave={"DIST_ATTN_ENGINE__KEYS_DIR": STAYS}, instead={"/etc/dist-attn/keys": "engine-keys"}),
    ),
    "docs/how-to/speed.md": (
        Run(
            "shell",
            leave={
                "dist-attn doctor": "it times exchanges for a minute; tests/commands/test_calibrate.py",
                "dist-attn plan": "it measures for a minute; tests/commands/test_rehearsal.py",
            },
            instead={"top --once": f"top --once {URL}"},
        ),
    ),
    "docs/how-to/two-nodes.md": (Not(SEVERAL_HOSTS),),
    "docs/how-to/your-model.md": (
        Elsewhere("tests/system/test_your_model.py"),
        Not("it needs a folder that is downloaded, and tiktoken"),
    ),
    "docs/reference/model-kinds.md": (
        Run("mixer"),
        Run("mixer"),
        Elsewhere("tests/rank/test_stream_encoder.py"),
        Run(
            "python",
            before=CLASSIFIER,
            instead={"stop = ...  ": "stop = SequenceLayout.even(prepared.shape[1], comm.size).range(comm.rank)  "},
        ),
        Run("python", before=CLASSIFIER),
    ),
    "docs/measurements/performance.md": (
        Not("commands with what they do beside them; tests of benchmarks run them with --smoke"),
    ),
    "docs/reference/service.md": (
        Run("shell", leave={"make serve": STAYS}),
        Run("python"),
        Run("answer", of="PromptProgress"),
        Run("shell", says=("encoding.summary",)),
        Run("shell", instead={'"job_…"': "\"'job_…'\""}, says=("search.results",)),
        Run("answer", of="SearchResults"),
        Run("shell"),
        Run("shell", instead={**SMALLER, **BREAKS_OFF, "+5242881": "+5243"}),
        Run("shell", instead={**SMALLER, **BREAKS_OFF}),
        Run("shell", says=('"position":9000', "data: [DONE]", '"object":"session"')),
        Run("answer", of="AppendSummary"),
        Run("settings", instead={'"…"': f'"{"0" * 64}"'}),
    ),
    "docs/measurements/shipped-models.md": (Run("shell"),),
    "docs/state.md": (
        Run(
            "python",
            before="""
            import torch
            from dist_attn.shipped import default_model_folder
            folder = default_model_folder()
            from dist_attn.checkpoints import load_model
            logits_V, state = load_model(folder).step(torch.tensor([5]), load_model(folder).initial_state(1))
            logits_V = logits_V[0]
            """,
        ),
        Not("it needs a store that was lost; tests/service/test_lost_catalogue.py repairs one"),
    ),
    "docs/reference/ops.md": (Run("python", instead={"100_000": "1_000"}),),
    "docs/reference/training-data.md": (
        Not("it needs a trained model; tests/training/test_tasks.py reads such folders"),
    ),
    "docs/how-to/training.md": (Not("it takes hours; tests/training/test_killed_mesh.py trains over such a mesh"),),
    "docs/tutorial.md": (
        Not(f"{INSTALLS}; {STAYS}"),
        Run("shell"),
        Run("shell"),
        Run("shell"),
        Run("python", before="import numpy; numpy.save('book.npy', numpy.zeros((3, 4), numpy.float32))"),
        Run("python", instead={"window=128": "window=64"}, says=("1.00  byte ",)),
        Run("python", says=("9000 tokens are read", "--- 2:", "still stands at 9000", "bytes hold all of it")),
        Run("shell", before="state"),
    ),
    "papers/README.md": (Run("syntax"),),
    "papers/docs/million.md": (DRAWING,),
    "papers/docs/models.md": (
        Elsewhere("papers/tests/test_encoder_decoder.py"),
        Not("it needs trained models; papers/tests/test_search_text.py reads such a folder"),
        Elsewhere("papers/tests/test_convert.py"),
        Elsewhere("papers/tests/test_convert.py"),
    ),
}
