from celery import chain
from celery.result import AsyncResult
from fastapi import Body, FastAPI

from worker import label, weigh

app = FastAPI()


@app.post("/parcels", status_code=201)
async def create(parcel: int = Body(embed=True)):
    return {"task_id": chain(weigh.s(parcel, grams=250), label.s()).apply_async().id}


@app.post("/weights", status_code=201)
def measure(parcel: int = Body(embed=True)):
    return {"task_id": weigh.delay(parcel).id}


@app.get("/tasks/{task_id}")
def status(task_id: str):
    result = AsyncResult(task_id)
    return {"status": result.status, "result": result.result}
