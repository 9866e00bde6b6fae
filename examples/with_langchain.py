"""dist-attn behind LangChain: completions, a chain, and search by embeddings, through the OpenAI-compatible routes.

Needs `pip install langchain-openai` (tried with 1.7.3, langchain-core 1.7.2) and a running service:

    dist-attn serve
    python examples/with_langchain.py

The model that ships continues texts and follows no instructions, so this takes LangChain's `OpenAI` (completions), not
its `ChatOpenAI`.
"""

import argparse
import sys


def main() -> None:
    """Complete, stream, chain, search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service, without /v1")
    parser.add_argument("--model", default="writer-12m", help="the id of the model that writes")
    parser.add_argument("--encoder", default="minilm-stream", help="the id of the model that makes vectors")
    parser.add_argument("--key", default="none", help="a key, where the service asks for one")
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    try:
        from langchain_core.prompts import PromptTemplate
        from langchain_core.vectorstores import InMemoryVectorStore
        from langchain_openai import OpenAI, OpenAIEmbeddings
    except ImportError as error:
        sys.exit(f"with_langchain: {error}; pip install langchain-openai")

    place = {"base_url": f"{options.url.rstrip('/')}/v1", "api_key": options.key}
    writer = OpenAI(**place, model=options.model, max_tokens=options.tokens, temperature=0.8, seed=1)

    print("--- streamed")
    for piece in writer.stream("It was the best of times"):
        print(piece, end="", flush=True)

    print("\n--- a chain")
    chain = PromptTemplate.from_template("The story of {who} begins in a small town. ") | writer
    print(chain.invoke({"who": "an old sailor"}))

    print("--- the nearest of three passages")
    # Texts are sent as they are: LangChain would otherwise cut them by a vocabulary of OpenAI's, which it downloads.
    vectors = OpenAIEmbeddings(**place, model=options.encoder, check_embedding_ctx_length=False)
    passages = InMemoryVectorStore.from_texts(
        ["The whale rose beside the boat.", "She danced with the count until dawn.", "The judge read the verdict."],
        vectors,
    )
    print(passages.similarity_search("They lowered the boats and rowed after the whale.", k=1)[0].page_content)


if __name__ == "__main__":
    main()
