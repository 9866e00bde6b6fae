"""The models that are served: one."""

from fastapi import APIRouter
from starlette.requests import Request

from dist_attn_service.dependencies import Services, services_of
from dist_attn_service.schemas.completions import ModelCard, ModelList

__all__ = ["router"]

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_model=ModelList, summary="List the models")
async def list_models(request: Request) -> ModelList:
    """The model of this service under each of its names."""
    services = services_of(request)
    return ModelList(data=[_card(services, name) for name in services.model.ids])


@router.get("/{model_id:path}", response_model=ModelCard, summary="One model")
async def get_model(request: Request, model_id: str) -> ModelCard:
    """The model of that name; 404 for any other."""
    services = services_of(request)
    services.check_model(model_id)
    return _card(services, model_id)


def _card(services: Services, name: str) -> ModelCard:
    model = services.model
    chat = ["chat/completions"] if services.chat.offered and "completions" in model.capabilities else []
    return ModelCard(
        id=name,
        created=model.created,
        capabilities=[*model.capabilities, *chat],
        embedding_size=model.hidden_size,
        max_model_len=model.max_tokens,
        num_layers=model.num_layers,
    )
