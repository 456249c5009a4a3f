"""Embeddings by LangChain's and LlamaIndex's clients of OpenAI, of texts and of a query, synchronous and not."""

import asyncio
import json
import sys

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, listed = sys.argv[1:]
texts = json.loads(listed)

# Its own counting of tokens is that of OpenAI's models.
chain = OpenAIEmbeddings(model="tiny", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0)
index = OpenAILikeEmbedding(model_name="tiny", api_base=f"{url}/v1", api_key="none", max_retries=0)
store = InMemoryVectorStore.from_texts(texts, chain)
Settings.llm = None
nodes = VectorStoreIndex(nodes=[TextNode(text=text) for text in texts], embed_model=index)
print(json.dumps({
    "langchain": [chain.embed_documents(texts), [chain.embed_query(text) for text in texts], asyncio.run(chain.aembed_documents(texts))],
    "llama_index": [
        index.get_text_embedding_batch(texts), [index.get_query_embedding(text) for text in texts], asyncio.run(index.aget_text_embedding_batch(texts)),
    ],
    "nearest": [
        [store.similarity_search(text, k=1)[0].page_content for text in texts],
        [nodes.as_retriever(similarity_top_k=1).retrieve(text)[0].text for text in texts],
    ],
}))  # fmt: skip
