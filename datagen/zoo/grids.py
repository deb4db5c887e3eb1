"""The sizes of each suite, one program per line; omitted settings are the family's defaults.

"standard" aims at two minutes for one run of each on two CPU cores, and at 6 GB (docs/zoo.md has
the measured figures). Depths are moderate since compile time grows with them; widths and lengths
vary. The last lines of each family are its long ones, of about one to ten seconds.
"""

from __future__ import annotations

GRIDS: dict[str, dict[str, str]] = {
    "mlp": {
        "quick": """
            batch=32 features=64 width=128 layers=2
            batch=32 features=64 width=128 layers=2 mode=train
        """,
        "standard": """
            batch=64 width=256 layers=3
            batch=256 width=512 layers=4
            batch=512 width=1024 layers=6
            batch=1024 width=2048 layers=4 activation=relu
            batch=16 width=4096 layers=3 activation=silu
            batch=256 width=512 layers=4 dtype=bf16
            batch=128 width=512 layers=3 mode=train
            batch=256 width=1024 layers=6 mode=train optimizer=sgd
            batch=512 width=2048 layers=3 activation=relu mode=train
            batch=2048 width=192 layers=8 activation=tanh target=value mode=train
            batch=1024 width=4096 layers=4 mode=train
            batch=4096 width=4096 layers=4
        """,
        "full": """
            batch=4096 width=4096 layers=6 mode=train
            batch=8192 width=4096 layers=8 dtype=bf16 mode=train
            batch=1024 width=8192 layers=4 dtype=bf16
        """,
    },
    "resnet": {
        "quick": """
            depth=18 width=8 image=32 stem=cifar classes=10 batch=4
        """,
        "standard": """
            depth=18 width=16 image=32 stem=cifar classes=10 batch=16
            depth=18 width=64 image=64 batch=4
            depth=18 width=64 image=224 batch=2
            depth=34 width=48 image=96 batch=4
            depth=50 width=64 image=128 batch=2
            depth=50 width=64 image=224 batch=4
            depth=18 width=32 image=128 batch=4 dtype=bf16
            depth=18 width=16 image=32 stem=cifar classes=100 batch=16 mode=train
            depth=18 width=64 image=96 batch=8 mode=train
            depth=34 width=32 image=64 batch=8 mode=train
            depth=50 image=224 batch=8 mode=train
            depth=101 image=224 batch=8
        """,
        "full": """
            depth=50 image=224 batch=64 dtype=bf16 mode=train
            depth=101 image=224 batch=32 dtype=bf16 mode=train
            depth=152 image=224 batch=64 dtype=bf16
            depth=200 image=256 batch=16
        """,
    },
    "convnext": {
        "standard": """
            size=atto image=64 batch=2
            size=atto image=128 batch=4
            size=femto image=96 batch=8
            size=pico image=160 batch=2
            size=nano image=128 batch=4
            size=tiny image=128 batch=2
            size=atto image=96 batch=4 dtype=bf16
            size=atto image=64 batch=4 mode=train
            size=tiny image=224 batch=4
            size=atto image=128 batch=16 mode=train
        """,
        "full": """
            size=tiny image=224 batch=32 mode=train
            size=small image=224 batch=64 dtype=bf16 mode=train
            size=base image=224 batch=64 dtype=bf16
        """,
    },
    "efficientnet": {
        "standard": """
            size=mini image=96 batch=4
            size=b0 image=64 batch=2
            size=b0 image=128 batch=4
            size=b0 image=224 batch=2
            size=b1 image=160 batch=2
            size=b2 image=96 batch=8
            size=b3 image=128 batch=4
            size=b0 image=96 batch=4 dtype=bf16
            size=mini image=64 batch=4 mode=train
            size=b0 image=224 batch=16
        """,
        "full": """
            size=b0 image=224 batch=32 mode=train
            size=b3 image=288 batch=32 dtype=bf16 mode=train
            size=b4 image=384 batch=32 dtype=bf16
        """,
    },
    # Widths of ViT-Ti (192), S (384), B (768) and L (1024).
    "vit": {
        "quick": """
            layers=2 dim=64 heads=2 hidden=128 image=64 classes=10 batch=2
        """,
        "standard": """
            layers=4 dim=192 heads=3 hidden=768 image=64 batch=4
            layers=12 dim=192 heads=3 hidden=768 image=224 batch=2
            layers=6 dim=384 heads=6 hidden=1536 image=224 batch=4
            layers=6 dim=768 heads=12 hidden=3072 image=224 batch=2
            layers=3 dim=256 heads=4 hidden=1024 image=256 patch=8 batch=1
            layers=4 dim=192 heads=3 hidden=768 image=160 batch=4 dtype=bf16
            layers=3 dim=128 heads=2 hidden=512 image=96 batch=8 mode=train
            layers=4 dim=384 heads=6 hidden=1536 image=160 batch=4 mode=train
            layers=3 dim=768 heads=12 hidden=3072 image=224 patch=32 batch=8 mode=train
            batch=8 mode=train
        """,
        "full": """
            batch=32 mode=train
            batch=128 dtype=bf16 mode=train
            layers=24 dim=1024 heads=16 hidden=4096 batch=32 dtype=bf16
        """,
    },
    # 76 predictions are 15 % of 512 tokens. Last lines: BERT base and large.
    "bert": {
        "quick": """
            layers=2 dim=64 heads=2 hidden=128 seq=32 vocab=500 batch=2
            layers=1 dim=64 heads=2 hidden=128 seq=32 vocab=500 batch=2 mode=train
        """,
        "standard": """
            layers=2 dim=128 heads=2 hidden=512 seq=64 batch=4
            layers=4 dim=256 heads=4 hidden=1024 seq=128 batch=4
            layers=6 dim=512 heads=8 hidden=2048 seq=64 batch=8
            layers=4 dim=768 heads=12 hidden=3072 seq=128 batch=4
            layers=3 dim=384 heads=6 hidden=1536 seq=512 batch=2
            layers=4 dim=256 heads=4 hidden=1024 seq=128 batch=4 dtype=bf16
            layers=2 dim=128 heads=2 hidden=512 seq=128 batch=8 mode=train
            layers=3 dim=384 heads=6 hidden=1536 seq=128 batch=4 mode=train
            layers=2 dim=768 heads=12 hidden=3072 seq=128 batch=4 mode=train
            layers=2 dim=256 heads=4 hidden=1024 seq=64 batch=8 dropout=0.1 mode=train
            batch=8 mode=train
        """,
        "full": """
            batch=32 mode=train
            batch=64 seq=512 masked=76 dropout=0.1 dtype=bf16 mode=train
            layers=24 dim=1024 heads=16 hidden=4096 seq=512 masked=76 batch=32 dtype=bf16
        """,
    },
    # Largest layers: Llama 3.2 1B (2048, 8192) and Llama 3 8B (4096, 14336).
    "llama": {
        "quick": """
            layers=2 dim=64 heads=4 kv_heads=2 hidden=128 seq=32 vocab=500 batch=2
            layers=1 dim=64 heads=4 kv_heads=2 hidden=128 seq=32 vocab=500 batch=2 mode=train
        """,
        "standard": """
            layers=2 dim=128 heads=4 kv_heads=2 hidden=384 seq=64 vocab=4096 batch=2
            layers=4 dim=256 heads=8 kv_heads=4 hidden=704 seq=128 vocab=8192 batch=2
            layers=4 dim=512 heads=8 kv_heads=2 hidden=1408 seq=256 vocab=16384 batch=2
            layers=2 dim=1024 heads=16 kv_heads=4 hidden=2816 seq=512 vocab=8192 batch=1
            layers=12 dim=512 heads=8 kv_heads=8 hidden=1408 seq=128 batch=1 scan_layers=true
            layers=4 dim=256 heads=4 kv_heads=4 hidden=704 seq=128 vocab=8192 batch=2 dtype=bf16
            layers=2 dim=256 heads=4 kv_heads=2 hidden=704 seq=128 vocab=4096 batch=2 mode=train
            layers=3 dim=384 heads=6 kv_heads=2 hidden=1024 seq=256 vocab=8192 batch=2 mode=train
            layers=2 dim=1024 heads=16 kv_heads=4 hidden=2816 seq=128 batch=2 mode=train
            layers=6 dim=512 heads=8 kv_heads=4 hidden=1408 seq=128 vocab=8192 batch=1 \
                scan_layers=true remat=true mode=train
            batch=4 mode=train
            layers=4 dim=2048 heads=32 kv_heads=8 hidden=5632 seq=512 batch=2
        """,
        "full": """
            batch=4 seq=512 mode=train
            layers=16 dim=2048 heads=32 kv_heads=8 hidden=8192 seq=1024 batch=4 dtype=bf16
            layers=16 dim=2048 heads=32 kv_heads=8 hidden=8192 seq=1024 batch=4 dtype=bf16 \
                scan_layers=true remat=true mode=train
            layers=8 dim=4096 heads=32 kv_heads=8 hidden=14336 seq=2048 batch=1 dtype=bf16
        """,
    },
    "llama_decode": {
        "quick": """
            layers=2 dim=64 heads=4 kv_heads=2 hidden=128 cache=64 vocab=500 batch=2
        """,
        "standard": """
            layers=4 dim=256 heads=8 kv_heads=4 hidden=704 cache=256 vocab=8192 batch=1
            layers=4 dim=256 heads=8 kv_heads=2 hidden=704 cache=2048 vocab=8192 batch=8
            layers=6 dim=512 heads=8 kv_heads=8 hidden=1408 cache=512 batch=4
            layers=6 dim=1024 heads=16 kv_heads=4 hidden=2816 cache=1024 batch=1
            layers=6 dim=1024 heads=16 kv_heads=4 hidden=2816 cache=512 batch=16
            layers=3 dim=2048 heads=32 kv_heads=8 hidden=5632 cache=512 batch=2
            layers=4 dim=768 heads=12 kv_heads=12 hidden=2048 cache=2048 batch=4 greedy=false
            layers=4 dim=512 heads=8 kv_heads=2 hidden=1408 cache=512 batch=4 dtype=bf16
            layers=12 dim=2048 heads=32 kv_heads=8 hidden=5632 cache=1024 batch=8
        """,
        "full": """
            layers=16 dim=2048 heads=32 kv_heads=8 hidden=8192 cache=4096 batch=16 dtype=bf16
            layers=16 dim=4096 heads=32 kv_heads=8 hidden=14336 cache=2048 batch=64 dtype=bf16
        """,
    },
    "moe": {
        "standard": """
            layers=2 dim=128 heads=4 kv_heads=2 hidden=256 seq=64 vocab=4096 experts=4
            layers=2 dim=256 heads=4 kv_heads=2 hidden=512 seq=128 vocab=8192 experts=8
            layers=2 dim=256 heads=4 kv_heads=2 hidden=512 seq=128 vocab=8192 experts=8 \
                dispatch=scatter
            layers=3 dim=512 heads=8 kv_heads=4 hidden=1024 seq=256 vocab=8192 experts=8
            layers=2 dim=512 heads=8 kv_heads=4 hidden=1408 seq=256 vocab=8192 experts=16 \
                top_k=1 dispatch=scatter
            layers=2 dim=256 heads=4 kv_heads=4 hidden=512 seq=128 vocab=4096 experts=4 \
                dispatch=dense
            layers=2 dim=256 heads=4 kv_heads=2 hidden=512 seq=128 vocab=4096 experts=8 dtype=bf16
            layers=2 dim=128 heads=4 kv_heads=2 hidden=256 seq=128 vocab=4096 experts=8 mode=train
            layers=2 dim=256 heads=4 kv_heads=2 hidden=512 seq=128 vocab=4096 experts=8 \
                dispatch=scatter mode=train
            layers=1 dim=512 heads=8 kv_heads=4 hidden=1024 seq=256 vocab=8192 experts=8 mode=train
            seq=512 mode=train
        """,
        "full": """
            batch=8 layers=8 dim=1024 heads=16 hidden=2816 seq=512 dispatch=scatter dtype=bf16
            batch=8 layers=4 dim=1024 heads=16 hidden=2816 seq=512 dtype=bf16 mode=train
        """,
    },
    "unet": {
        "standard": """
            image=16 channels=32 levels=2 blocks=1 attention_levels=1 batch=4
            image=32 channels=32 levels=3 blocks=1 attention_levels=1 batch=2
            image=32 channels=64 levels=3 blocks=1 attention_levels=2 batch=4
            image=64 channels=64 levels=3 blocks=1 attention_levels=1 batch=1
            image=64 channels=96 levels=4 blocks=1 attention_levels=2 batch=1
            image=32 channels=32 levels=3 blocks=1 attention_levels=1 batch=2 dtype=bf16
            image=16 channels=32 levels=2 blocks=1 attention_levels=1 batch=8 optimizer=sgd \
                mode=train
            image=32 channels=64 levels=2 blocks=1 attention_levels=1 batch=2 \
                optimizer=sgd mode=train
            image=64 channels=64 levels=3 blocks=1 attention_levels=1 batch=4 mode=train
        """,
        "full": """
            image=64 channels=128 levels=4 batch=4
            image=64 channels=128 levels=4 batch=16 mode=train
            image=64 channels=192 levels=4 batch=32 dtype=bf16 mode=train
        """,
    },
    "ssm": {
        "standard": """
            layers=2 dim=64 seq=64 state=8 vocab=4096
            layers=2 dim=128 seq=256 state=16 vocab=4096
            layers=4 dim=256 seq=128 state=16 vocab=8192
            layers=2 dim=256 seq=512 state=8 vocab=8192 batch=1
            layers=2 dim=768 seq=128 state=16 batch=1
            layers=2 dim=128 seq=128 state=16 vocab=4096 dtype=bf16
            layers=1 dim=128 seq=128 state=8 vocab=4096 mode=train
            layers=2 dim=256 seq=64 state=16 vocab=8192 mode=train
            layers=4 dim=512 seq=512 batch=2
        """,
        "full": """
            layers=12 dim=768 seq=1024 batch=2
            layers=8 dim=768 seq=1024 batch=4 dtype=bf16 mode=train
        """,
    },
    # 650 and 1500 are the medium and large models of Zaremba et al. (2014).
    "lstm": {
        "quick": """
            layers=1 dim=64 seq=16 vocab=500 batch=4
            layers=1 dim=64 seq=16 vocab=500 batch=4 mode=train
        """,
        "standard": """
            layers=1 dim=128 seq=32 vocab=2000 batch=16
            layers=2 dim=256 seq=64 vocab=5000 batch=16
            layers=2 dim=512 seq=64 batch=32
            layers=2 dim=1024 seq=32 batch=16
            layers=2 dim=256 seq=64 vocab=5000 batch=32 cell=gru
            layers=1 dim=650 seq=128 batch=8 cell=gru
            layers=1 dim=256 seq=32 vocab=5000 batch=16 dtype=bf16
            layers=1 dim=256 seq=32 vocab=5000 batch=16 mode=train
            layers=2 dim=512 seq=32 batch=16 mode=train optimizer=sgd
            layers=2 dim=256 seq=64 vocab=5000 batch=16 cell=gru mode=train
            layers=2 dim=1024 seq=64 batch=64 mode=train
        """,
        "full": """
            layers=2 dim=1500 seq=128 batch=64 mode=train
            layers=4 dim=2048 seq=128 batch=128 dtype=bf16
        """,
    },
    # 2708 nodes: Cora; 169343 nodes: ogbn-arxiv. Batches of small graphs stand for molecules.
    "gnn": {
        "quick": """
            nodes=256 edges=1024 features=32 dim=32 layers=2 heads=2
            nodes=256 edges=1024 features=32 dim=32 layers=2 heads=2 mode=train
        """,
        "standard": """
            nodes=1024 edges=8192 dim=64 layers=2
            nodes=2708 edges=10556 features=1433 dim=64 layers=2 classes=7
            nodes=16384 edges=131072 dim=128 layers=3
            nodes=2048 edges=16384 dim=64 layers=2 conv=gat
            nodes=8192 edges=65536 dim=128 layers=2 conv=gat
            nodes=2048 edges=16384 dim=128 layers=3 conv=mpnn
            nodes=64 edges=256 dim=128 layers=4 conv=mpnn batch=32
            nodes=2048 edges=16384 dim=64 layers=2 dtype=bf16
            nodes=4096 edges=32768 dim=128 layers=3 mode=train
            nodes=2048 edges=8192 dim=64 layers=2 conv=gat mode=train
            nodes=32 edges=128 dim=64 layers=3 conv=mpnn batch=64 mode=train
            nodes=65536 edges=524288 dim=128 layers=3 mode=train
        """,
        "full": """
            nodes=169343 edges=1166243 features=128 dim=256 layers=3 classes=40 mode=train
            nodes=65536 edges=1048576 dim=256 layers=3 conv=gat
            nodes=65536 edges=524288 dim=256 layers=4 conv=mpnn dtype=bf16 mode=train
        """,
    },
    # Tables are far smaller than production's: gathers of rows, not their number, take the time.
    "dlrm": {
        "quick": """
            batch=16 tables=4 rows=100 dim=16 bottom=32 top=32
        """,
        "standard": """
            batch=64 tables=8 rows=2000 dim=16 bottom=128 top=128
            batch=256 tables=26 rows=5000 dim=32 lookups=1
            batch=1024 tables=26 rows=5000 dim=64 bottom=512 top=1024
            batch=2048 tables=12 rows=50000 dim=64 lookups=8
            batch=512 tables=8 rows=100000 dim=128 bottom=1024 top=2048
            batch=256 tables=16 rows=5000 dim=64 dtype=bf16
            batch=128 tables=8 rows=2000 dim=16 bottom=128 top=128 mode=train
            batch=512 tables=8 rows=20000 dim=64 lookups=1 mode=train optimizer=sgd
            batch=256 tables=12 rows=20000 dim=64 mode=train
            batch=8192 tables=26 rows=50000 dim=64 bottom=512 top=1024 lookups=4 mode=train
        """,
        "full": """
            batch=8192 rows=200000 dim=128 bottom=1024 top=2048
            batch=8192 rows=200000 dim=64 lookups=8 mode=train optimizer=sgd
        """,
    },
    "convnet_1d": {
        "standard": """
            samples=4000 channels=64 blocks=2 batch=2
            samples=16000 channels=64 blocks=4 batch=4
            samples=16000 channels=128 blocks=8 batch=4
            samples=48000 channels=128 blocks=4 batch=2
            samples=16000 channels=256 blocks=4 batch=2
            samples=8000 channels=64 blocks=4 batch=4 dtype=bf16
            samples=4000 channels=64 blocks=2 batch=4 mode=train
            samples=16000 channels=128 blocks=3 stem_layers=4 batch=2 mode=train
            samples=48000 channels=256 blocks=4 batch=4 mode=train
        """,
        "full": """
            samples=160000 channels=512 blocks=8 stem_layers=7 batch=8 dtype=bf16
            samples=160000 channels=256 blocks=8 stem_layers=6 batch=16 mode=train
        """,
    },
}
"""Suite by family, then by tier ("quick", "standard", "full" without what standard has)."""
