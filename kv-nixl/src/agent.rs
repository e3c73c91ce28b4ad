//! The library's agent, with its calls made safe: handles are live, lists are freed, texts are copied.
//!
//! Requests are the exception: nothing here lets go of one by itself. [`Request`] has no destructor; who has proof that
//! its transfer is over calls [`Agent::release`], and one without proof is kept.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::memory::MemoryKind;
use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind};
use nixl_capi_sys::{AgentConfig, Api, Handle, OP_WRITE, SYNC_RW, mem, status};

use crate::config::{NixlConfig, PeerErrors};

/// A status that is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub c_int);

impl Code {
    pub fn name(self) -> &'static str {
        status::name(self.0)
    }
}

fn check(code: c_int) -> Result<(), Code> {
    if code == status::SUCCESS { Ok(()) } else { Err(Code(code)) }
}

/// How a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    Going,
    Failed(Code),
}

fn progress(code: c_int) -> Progress {
    match code {
        status::SUCCESS => Progress::Done,
        status::IN_PROG => Progress::Going,
        code => Progress::Failed(Code(code)),
    }
}

/// A transfer of the library. Without a destructor: see the module.
#[derive(Debug)]
pub(crate) struct Request(Handle);

// SAFETY: the library's requests are bound to no thread; the agent is set up for calls from several.
unsafe impl Send for Request {}

/// The library's kind and device number of memory.
fn kind(memory: MemoryKind) -> (c_int, u64) {
    match memory {
        MemoryKind::Dram => (mem::DRAM, 0),
        MemoryKind::Vram { device } => (mem::VRAM, device.into()),
    }
}

/// A list of ranges for a transfer.
pub(crate) struct List<'a> {
    api: &'a Api,
    handle: Handle,
    device: u64,
}

impl<'a> List<'a> {
    fn new(api: &'a Api, memory: MemoryKind) -> Result<Self, Code> {
        let (kind, device) = kind(memory);
        let mut handle = null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { (api.create_xfer_dlist)(kind, &raw mut handle) })?;
        Ok(Self { api, handle, device })
    }

    pub fn add(&mut self, addr: u64, len: u64) -> Result<(), Code> {
        // SAFETY: our list.
        check(unsafe { (self.api.xfer_dlist_add_desc)(self.handle, addr as usize, len as usize, self.device) })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: our list, ended once; requests have copies.
        unsafe { (self.api.destroy_xfer_dlist)(self.handle) };
    }
}

/// A list whose ranges have been looked up: [`crate::prepared`].
pub(crate) struct Prepared {
    agent: Arc<Agent>,
    handle: Handle,
}

// SAFETY: as for requests.
unsafe impl Send for Prepared {}
// SAFETY: the library only reads it.
unsafe impl Sync for Prepared {}

impl Drop for Prepared {
    fn drop(&mut self) {
        // SAFETY: ours, ended once; transfers that were made of it have copies.
        unsafe { (self.agent.api.release_xfer_dlist_handle)(self.agent.handle, self.handle) };
    }
}

/// A registration.
pub(crate) struct Registration(Handle);

// SAFETY: as for requests.
unsafe impl Send for Registration {}
// SAFETY: it is only read (passed to the library) until it is taken apart by its owner.
unsafe impl Sync for Registration {}

pub(crate) struct Agent {
    api: Api,
    handle: Handle,
    backend: Handle,
}

// SAFETY: the agent is made with SYNC_RW: its calls may come from several threads at once.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

impl Agent {
    /// An agent with its backend.
    pub fn new(api: Api, name: &CStr, config: &NixlConfig) -> Result<Self, TransportError> {
        let failed = |what: &str, code: Code| {
            TransportError::new(ErrorKind::Unavailable, format!("NIXL cannot {what}: {}", code.name()))
        };
        let settings = AgentConfig {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            sync: SYNC_RW,
            workers: config.workers.max(1),
            progress_delay_us: u64::try_from(config.progress_delay.as_micros()).unwrap_or(u64::MAX).max(1),
            listen_delay_us: 100_000,
            telemetry: false,
        };
        let mut handle = null_mut();
        // SAFETY: a string that ends in 0, settings of the library's layout, a place for the handle.
        check(unsafe { (api.create_configured_agent)(name.as_ptr(), &raw const settings, &raw mut handle) })
            .map_err(|e| failed("make an agent", e))?;
        let mut agent = Self { api, handle, backend: null_mut() };
        let errors = match config.errors {
            PeerErrors::Noticed => "peer",
            PeerErrors::Ignored => "none",
        };
        let mut parameters = vec![
            ("num_workers".to_owned(), config.workers.max(1).to_string()),
            ("ucx_error_handling_mode".to_owned(), errors.to_owned()),
        ];
        parameters.extend(config.parameters.iter().cloned());
        agent.backend = agent.create_backend(&config.backend, &parameters).map_err(|code| {
            let tls = std::env::var("UCX_TLS").map_or("not set".into(), |v| format!("{v:?}"));
            let text = format!(
                "NIXL cannot start its backend {}: {} (UCX_TLS is {tls}; without tcp or an RDMA transport in it UCX has \
                 nothing that notices failures)",
                config.backend,
                code.name()
            );
            TransportError::new(ErrorKind::Unavailable, text)
        })?;
        Ok(agent)
    }

    fn create_backend(&self, name: &str, parameters: &[(String, String)]) -> Result<Handle, Code> {
        let text = |s: &str| CString::new(s).map_err(|_| Code(status::INVALID_PARAM));
        let name = text(name)?;
        let mut params = null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { (self.api.create_params)(&raw mut params) })?;
        let add = |(key, value): &(String, String)| {
            let (key, value) = (text(key)?, text(value)?);
            // SAFETY: live handle, strings that end in 0, copied by the library.
            check(unsafe { (self.api.params_add)(params, key.as_ptr(), value.as_ptr()) })
        };
        let mut backend = null_mut();
        let made = parameters.iter().try_for_each(add).and_then(|()| {
            // SAFETY: live handles, a place for the new one.
            check(unsafe { (self.api.create_backend)(self.handle, name.as_ptr(), params, &raw mut backend) })
        });
        // SAFETY: ours, ended once.
        unsafe { (self.api.destroy_params)(params) };
        made.map(|()| backend)
    }

    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Names of the plugins the library finds.
    pub fn plugins(&self) -> Vec<String> {
        let mut list = null_mut();
        // SAFETY: live agent, a place for the list.
        if check(unsafe { (self.api.get_available_plugins)(self.handle, &raw mut list) }).is_err() {
            return Vec::new();
        }
        let mut size = 0;
        // SAFETY: live list, a place for the size.
        let _ = unsafe { (self.api.string_list_size)(list, &raw mut size) };
        let names = (0..size).filter_map(|i| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: an index below its size, a place for the pointer.
            check(unsafe { (self.api.string_list_get)(list, i, &raw mut text) }).ok()?;
            // SAFETY: the library's string, which lives as long as the list.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        });
        let names = names.collect();
        // SAFETY: ours, ended once.
        unsafe { (self.api.destroy_string_list)(list) };
        names
    }

    /// What a peer loads to write here.
    pub fn local_metadata(&self) -> Result<Bytes, Code> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: live agent, places for the pointer and the length.
        check(unsafe { (self.api.get_local_md)(self.handle, &raw mut data, &raw mut len) })?;
        if data.is_null() {
            return Err(Code(status::BACKEND));
        }
        // SAFETY: the library gave `len` bytes at `data`.
        let bytes = Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) });
        // SAFETY: ours to free, once.
        unsafe { nixl_capi_sys::free(data) };
        Ok(bytes)
    }

    /// Load a peer's metadata; the name it has in there.
    pub fn load(&self, metadata: &[u8]) -> Result<CString, Code> {
        let mut name: *mut c_char = null_mut();
        // SAFETY: live agent, bytes with their length, a place for the pointer.
        check(unsafe {
            (self.api.load_remote_md)(self.handle, metadata.as_ptr().cast(), metadata.len(), &raw mut name)
        })?;
        if name.is_null() {
            return Err(Code(status::BACKEND));
        }
        // SAFETY: the library's string, ours until it is freed.
        let text = unsafe { CStr::from_ptr(name) }.to_owned();
        // SAFETY: ours to free, once.
        unsafe { nixl_capi_sys::free(name.cast()) };
        Ok(text)
    }

    /// Forget a peer, and close the endpoint to it.
    pub fn invalidate(&self, name: &CStr) -> Result<(), Code> {
        // SAFETY: live agent, a string that ends in 0.
        check(unsafe { (self.api.invalidate_remote_md)(self.handle, name.as_ptr()) })
    }

    /// Connect to a loaded peer.
    pub fn make_connection(&self, name: &CStr) -> Result<(), Code> {
        // SAFETY: live agent, a string that ends in 0; no options.
        check(unsafe { (self.api.agent_make_connection)(self.handle, name.as_ptr(), null_mut()) })
    }

    pub fn register(&self, addr: u64, len: u64, memory: MemoryKind) -> Result<Registration, Code> {
        let (kind, device) = kind(memory);
        let mut list = null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { (self.api.create_reg_dlist)(kind, &raw mut list) })?;
        // SAFETY: live handles; the caller holds the memory, whose range this is.
        let made = check(unsafe {
            (self.api.reg_dlist_add_desc)(list, addr as usize, len as usize, device, std::ptr::null(), 0)
        })
        // SAFETY: as above.
        .and_then(|()| check(unsafe { (self.api.register_mem)(self.handle, list, null_mut()) }));
        if let Err(code) = made {
            // SAFETY: ours, ended once.
            unsafe { (self.api.destroy_reg_dlist)(list) };
            return Err(code);
        }
        Ok(Registration(list))
    }

    /// End a registration.
    pub fn deregister(&self, registration: Registration) -> Result<(), Code> {
        // SAFETY: live handles of this agent.
        let ended = check(unsafe { (self.api.deregister_mem)(self.handle, registration.0, null_mut()) });
        // SAFETY: ours, ended once.
        unsafe { (self.api.destroy_reg_dlist)(registration.0) };
        ended
    }

    pub fn list(&self, memory: MemoryKind) -> Result<List<'_>, Code> {
        List::new(&self.api, memory)
    }

    /// A write of `local` into `remote` of a peer: refused when the peer did not register what is written.
    pub fn create(&self, name: &CStr, local: &List<'_>, remote: &List<'_>) -> Result<Request, Code> {
        let mut request = null_mut();
        // SAFETY: live handles of this agent, a string that ends in 0, a place for the handle; no options.
        check(unsafe {
            (self.api.create_xfer_req)(
                self.handle,
                OP_WRITE,
                local.handle,
                remote.handle,
                name.as_ptr(),
                &raw mut request,
                null_mut(),
            )
        })?;
        Ok(Request(request))
    }

    /// Look up `slots` items that lie back to back from `addr` on: of a peer, or our own.
    pub fn prepare(
        self: &Arc<Self>,
        owner: Option<&CStr>,
        (addr, item_len, kind): (u64, u64, MemoryKind),
        slots: u64,
    ) -> Result<Prepared, Code> {
        let bad = Code(status::INVALID_PARAM);
        item_len.checked_mul(slots).and_then(|len| addr.checked_add(len)).ok_or(bad)?;
        let mut list = self.list(kind)?;
        (0..slots).try_for_each(|i| list.add(addr + i * item_len, item_len))?;
        let mut handle = null_mut();
        // SAFETY: live handles, a string that ends in 0 (empty: our own memory), a place for the handle; no options.
        check(unsafe {
            (self.api.prep_xfer_dlist)(
                self.handle,
                owner.unwrap_or(c"").as_ptr(),
                list.handle,
                &raw mut handle,
                null_mut(),
            )
        })?;
        Ok(Prepared { agent: Arc::clone(self), handle })
    }

    /// A write of items of one prepared list into items of another.
    pub fn make(
        &self,
        (local, ours): (&Prepared, &[c_int]),
        (remote, theirs): (&Prepared, &[c_int]),
    ) -> Result<Request, Code> {
        let mut request = null_mut();
        // SAFETY: live handles, indices with their counts, a place for the handle; no options.
        check(unsafe {
            (self.api.make_xfer_req)(
                self.handle,
                OP_WRITE,
                local.handle,
                ours.as_ptr(),
                ours.len(),
                remote.handle,
                theirs.as_ptr(),
                theirs.len(),
                &raw mut request,
                null_mut(),
            )
        })?;
        Ok(Request(request))
    }

    /// Start it. Copies before it returns where the peer is on this host.
    pub fn post(&self, request: &Request) -> Progress {
        // SAFETY: live handles; no options. The memory is held by the op that owns the request.
        progress(unsafe { (self.api.post_xfer_req)(self.handle, request.0, null_mut()) })
    }

    pub fn status(&self, request: &Request) -> Progress {
        // SAFETY: live handles.
        progress(unsafe { (self.api.get_xfer_status)(self.handle, request.0) })
    }

    /// Let go of a request that is over, or was never posted, or whose peer is proven dead.
    pub fn release(&self, request: Request) {
        // SAFETY: live handles; the request is gone after this.
        unsafe {
            (self.api.release_xfer_req)(self.handle, request.0);
            (self.api.destroy_xfer_req)(request.0);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: ours, ended once; nothing uses the agent any more.
        unsafe {
            if !self.backend.is_null() {
                (self.api.destroy_backend)(self.backend);
            }
            (self.api.destroy_agent)(self.handle);
        }
    }
}
